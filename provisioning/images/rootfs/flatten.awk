# Block YAML as the seed is written (one value a line, strings quoted as JSON quotes them) to lines of `path TAB value`.
function clean(text) {
    if (text ~ /^".*"$/) {
        text = substr(text, 2, length(text) - 2)
        gsub(/\\"/, "\"", text)
        gsub(/\\\\/, "\\", text)
    }
    return text
}
function pop(indent, keeps_key) {
    while (depth > 0 && (indents[depth] > indent || (indents[depth] == indent && !(keeps_key && is_key[depth])))) depth--
}
function push(indent, path, key) {
    depth++
    is_key[depth] = key
    indents[depth] = indent
    paths[depth] = path
}
/^ *(#.*)?$/ { next }
{
    match($0, /^ */)
    indent = RLENGTH
    text = substr($0, indent + 1)
    pop(indent, text ~ /^- /)
    if (text ~ /^- /) {
        parent = paths[depth]
        push(indent, parent "." (count[parent] + 0), 0)
        count[parent]++
        text = substr(text, 3)
        indent += 2
        if (text !~ /^[A-Za-z0-9_-]+:( |$)/) {
            print paths[depth] "\t" clean(text)
            next
        }
    }
    colon = index(text, ":")
    path = paths[depth] "." substr(text, 1, colon - 1)
    value = substr(text, colon + 2)
    if (value == "") push(indent, path, 1)
    else print path "\t" clean(value)
}
