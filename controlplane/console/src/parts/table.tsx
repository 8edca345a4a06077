/** A list: sort, search, choose columns, act on many. Only the rows in sight are in the page, so ten thousand scroll like ten. */
import { useVirtualizer } from "@tanstack/react-virtual";
import { type ReactNode, useMemo, useRef } from "react";
import { Link, useSearchParams } from "react-router";
import { at, compare, words } from "../format";
import type { Column, Kind } from "../nouns";
import { State } from "./basics";

type AnyRow = Record<string, unknown> & { id: string };
type Props = {
  label: string; columns: Column<Record<string, unknown>>[]; rows: AnyRow[]; name: (row: AnyRow) => string; link: (row: AnyRow) => string | null;
  chosen: Set<string>; onChoose: (ids: Set<string>) => void; menu: (row: AnyRow) => ReactNode;
};

const ROW_PX = 41;

function Cell({ value, kind }: { value: unknown; kind: Kind | undefined }) {
  const text = words(value, kind);
  if (kind === "state" && typeof value === "string") return <State value={value} />;
  if (kind === "time") return <time dateTime={String(value ?? "")} title={String(value ?? "")}>{text}</time>;
  return kind === "code" || kind === "address" ? <code>{text}</code> : <>{text}</>;
}

export function Table({ label, columns, rows, name, link, chosen, onChoose, menu }: Props) {
  const [query, setQuery] = useSearchParams();
  const sort = query.get("sort") ?? "";
  const search = (query.get("q") ?? "").toLowerCase();
  const hidden = useMemo(() => new Set((query.get("hide") ?? "").split(",").filter(Boolean)), [query]);
  const seen = columns.filter((column) => !hidden.has(column.field));

  const shown = useMemo(() => {
    const found = search ? rows.filter((row) => [name(row), row.id, ...columns.map((column) => words(at(row, column.field), column.kind))].some((text) => text.toLowerCase().includes(search))) : rows;
    if (!sort) return found;
    const field = sort.replace(/^-/, "");
    const sign = sort.startsWith("-") ? -1 : 1;
    const key = (row: AnyRow) => (field === "name" ? name(row) : at(row, field));
    return [...found].sort((left, right) => sign * compare(key(left), key(right)));
  }, [rows, search, sort, columns, name]);

  const set = (change: Record<string, string>) =>
    setQuery((now) => {
      for (const [key, value] of Object.entries(change)) value ? now.set(key, value) : now.delete(key);
      return now;
    }, { replace: true });
  const by = (field: string) => set({ sort: sort === field ? `-${field}` : sort === `-${field}` ? "" : field });
  const direction = (field: string) => (sort === field ? "ascending" : sort === `-${field}` ? "descending" : "none");

  const box = useRef<HTMLDivElement>(null);
  const virtual = useVirtualizer({ count: shown.length, getScrollElement: () => box.current, estimateSize: () => ROW_PX, overscan: 12 });
  const items = virtual.getVirtualItems();
  const above = items[0]?.start ?? 0;
  const below = virtual.getTotalSize() - (items.at(-1)?.end ?? 0);
  const width = seen.length + 3;

  const head = (title: string, field: string) => (
    <th key={field} scope="col" aria-sort={direction(field)} className="sticky top-0 z-1 border-b border-(--line) bg-(--card) px-3 py-2 text-left font-medium">
      <button type="button" className="cursor-pointer bg-transparent" onClick={() => by(field)}>{title}<span aria-hidden="true" className="soft"> {direction(field) === "ascending" ? "↑" : direction(field) === "descending" ? "↓" : ""}</span></button>
    </th>
  );
  const all = shown.length > 0 && shown.every((row) => chosen.has(row.id));
  return (
    <>
      <div className="mb-2 flex flex-wrap items-center gap-2">
        <input className="field max-w-64" type="search" placeholder="Search" aria-label={`Search ${label}`} value={query.get("q") ?? ""} onChange={(event) => set({ q: event.target.value })} />
        <details className="relative">
          <summary className="button list-none">Columns</summary>
          <div className="card absolute z-10 mt-1 p-2">
            {columns.map((column) => (
              <label key={column.field} className="flex gap-2 whitespace-nowrap">
                <input type="checkbox" checked={!hidden.has(column.field)} onChange={() => { const next = new Set(hidden); next.has(column.field) ? next.delete(column.field) : next.add(column.field); set({ hide: [...next].join(",") }); }} />
                {column.title}
              </label>
            ))}
          </div>
        </details>
        <span className="soft text-xs" role="status">{shown.length === rows.length ? `${rows.length} in all` : `${shown.length} of ${rows.length}`}</span>
      </div>
      <div ref={box} className="card max-h-[65vh] overflow-auto" tabIndex={0} role="region" aria-label={label}>
        <table className="w-full border-collapse" aria-rowcount={shown.length + 1}>
          <thead>
            <tr>
              <th scope="col" className="sticky top-0 z-1 border-b border-(--line) bg-(--card) px-3"><input type="checkbox" aria-label="Choose all" checked={all} onChange={() => onChoose(all ? new Set() : new Set(shown.map((row) => row.id)))} /></th>
              {head("Name", "name")}
              {seen.map((column) => head(column.title, column.field))}
              <th scope="col" className="sticky top-0 z-1 border-b border-(--line) bg-(--card) px-3"><span className="sr-only">Actions</span></th>
            </tr>
          </thead>
          <tbody>
            {above > 0 && <tr aria-hidden="true"><td colSpan={width} style={{ height: above }} /></tr>}
            {items.map((item) => {
              const row = shown[item.index];
              if (!row) return null;
              const to = link(row);
              return (
                <tr key={row.id} aria-rowindex={item.index + 2} className="border-b border-(--line) last:border-0" style={{ height: ROW_PX }}>
                  <td className="px-3"><input type="checkbox" aria-label={`Choose ${name(row)}`} checked={chosen.has(row.id)} onChange={() => { const next = new Set(chosen); next.has(row.id) ? next.delete(row.id) : next.add(row.id); onChoose(next); }} /></td>
                  <td className="px-3 font-medium">{to ? <Link to={to} className="text-(--accent) underline">{name(row)}</Link> : name(row)}</td>
                  {seen.map((column) => <td key={column.field} className="max-w-96 truncate px-3"><Cell value={at(row, column.field)} kind={column.kind} /></td>)}
                  <td className="px-3 text-right">{menu(row)}</td>
                </tr>
              );
            })}
            {below > 0 && <tr aria-hidden="true"><td colSpan={width} style={{ height: below }} /></tr>}
          </tbody>
        </table>
      </div>
    </>
  );
}
