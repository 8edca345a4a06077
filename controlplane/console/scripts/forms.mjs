// Takes from the OpenAPI document what forms need: the fields of each body, with their help, bounds and examples.
import { readFileSync, writeFileSync } from "node:fs";

const openapi = JSON.parse(readFileSync(new URL("../../../docs/reference/openapi.json", import.meta.url), "utf8"));
const schemas = openapi.components.schemas;

function resolved(schema) {
  return schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
}

/** The one type a field has besides null, and whether null is allowed. */
function narrowed(schema) {
  const options = (schema.anyOf ?? schema.oneOf ?? [schema]).map(resolved);
  const kinds = options.filter((option) => option.type !== "null");
  return { schema: kinds.length === 1 ? { ...kinds[0], ...schema } : { ...schema, type: "json" }, isNullable: kinds.length < options.length };
}

function field(name, given, required) {
  const { schema, isNullable } = narrowed(given);
  const simple = ["string", "integer", "number", "boolean"].includes(schema.type);
  const isTexts = schema.type === "array" && resolved(schema.items ?? {}).type === "string";
  return {
    name,
    kind: schema.enum ? "choice" : simple ? schema.type : isTexts ? "texts" : "json",
    isRequired: required.includes(name),
    isNullable,
    help: schema.description ?? "",
    example: schema.examples?.[0] ?? null,
    initial: schema.default ?? null,
    choices: schema.enum ?? [],
    minimum: schema.minimum ?? null,
    maximum: schema.maximum ?? null,
  };
}

const forms = {};
for (const methods of Object.values(openapi.paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    const body = operation.requestBody?.content?.["application/json"]?.schema;
    if (!body || !["post", "patch"].includes(method)) continue;
    const schema = resolved(body);
    if (schema.type !== "object") continue;
    forms[operation.operationId] = Object.entries(schema.properties ?? {}).map(([name, given]) =>
      field(name, given, schema.required ?? []),
    );
  }
}
writeFileSync(new URL("../src/api/forms.json", import.meta.url), JSON.stringify(forms));
