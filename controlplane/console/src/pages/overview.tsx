/** What is there, what runs, what is wrong. */
import { useQuery } from "@tanstack/react-query";
import { Link, useParams } from "react-router";
import { all, type Row } from "../api/client";
import { useMe } from "../api/session";
import { ago, bytes } from "../format";
import { BY_KEY, linkOf, type Noun, pathOf } from "../nouns";
import { State, Trouble } from "../parts/basics";

function useRows(path: string, isWanted = true) {
  return useQuery({ queryKey: ["data", path], queryFn: () => all(path), refetchInterval: 15_000, enabled: isWanted });
}

function Tile({ noun, project }: { noun: Noun; project: string }) {
  const { data, error } = useRows(pathOf(noun, project));
  const states = new Map<string, number>();
  for (const row of data ?? []) {
    const state = String(row.status ?? row.state ?? "");
    if (state) states.set(state, (states.get(state) ?? 0) + 1);
  }
  return (
    <Link to={linkOf(noun, project)} className="card block p-4 no-underline text-inherit">
      <div className="soft">{noun.title}</div>
      <div className="text-2xl font-semibold">{error ? "?" : (data?.length ?? "…")}</div>
      <div className="flex flex-wrap gap-x-3 text-xs">{[...states].map(([state, count]) => <span key={state}>{count} <State value={state} /></span>)}</div>
    </Link>
  );
}

export function Overview() {
  const { project = "default" } = useParams();
  const { data: me } = useMe();
  return (
    <>
      <h1 className="m-0 mb-4 text-xl font-semibold">Project {project}</h1>
      <div className="mb-8 grid grid-cols-[repeat(auto-fill,minmax(13rem,1fr))] gap-3">
        {["vms", "endpoints", "loadbalancers", "networks", "addresses", "keys"].map((key) => { const noun = BY_KEY.get(key); return noun ? <Tile key={key} noun={noun} project={project} /> : null; })}
      </div>
      {me?.is_operator && <Fleet />}
    </>
  );
}

function Fleet() {
  const hosts = useRows("/v1/hosts");
  const incidents = useRows("/v1/incidents");
  const open = (incidents.data ?? []).filter((row) => row.state === "open");
  return (
    <>
      <h2 className="text-lg font-semibold">Fleet</h2>
      {hosts.error && <Trouble problem={hosts.error} />}
      <ul className="mb-6 grid list-none grid-cols-[repeat(auto-fill,minmax(17rem,1fr))] gap-3 p-0">
        {(hosts.data ?? []).map((row) => <Host key={row.id} row={row} />)}
      </ul>
      <h2 className="text-lg font-semibold">Incidents</h2>
      {incidents.data && !open.length && <p className="soft">Nothing is wrong.</p>}
      <ul className="grid list-none gap-2 p-0">
        {open.map((row) => <li key={row.id} className="card p-3"><Link to={`/incidents/${row.id}`} className="text-(--accent) underline"><code>{String(row.code)}</code></Link> {String(row.detail)} <span className="soft">{String(row.count)} times, last {ago(String(row.last_at))}</span></li>)}
      </ul>
    </>
  );
}

function Host({ row }: { row: Row }) {
  const observed = (row.observed ?? {}) as Record<string, unknown>;
  const number = (...keys: string[]) => keys.map((key) => observed[key]).find((value) => typeof value === "number") as number | undefined;
  const cores = number("cores", "cpu_cores", "vcpus");
  const memory = number("memory_bytes", "memory_total_bytes");
  return (
    <li className="card p-4">
      <Link to={`/hosts/${row.id}`} className="font-medium text-(--accent) underline">{String(row.name)}</Link> <State value={String(row.state)} />
      <div className="soft text-xs">{[cores && `${cores} cores`, memory && bytes(memory), ...((row.roles ?? []) as string[])].filter(Boolean).join(" · ")}</div>
    </li>
  );
}
