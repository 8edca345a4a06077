/** Any noun's list. What is chosen, sorted and searched stands in the URL. */
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { useNavigate, useParams } from "react-router";
import { all, call, type Row } from "../api/client";
import { useRefusal } from "../api/session";
import { type Action, inProject, linkOf, nameOf, type Noun, pathOf } from "../nouns";
import { Act, Empty, Trouble, Updated } from "../parts/basics";
import { Box, Destroy } from "../parts/dialog";
import { Form } from "../parts/form";
import { type Item, MenuButton, RowMenu } from "../parts/menu";
import { Table } from "../parts/table";

const POLL_MS = 15_000;

type Asking = { kind: "create" } | { kind: "destroy"; rows: Row[] } | { kind: "act"; row: Row; action: Action } | { kind: "shown"; body: Row } | null;

export function List({ noun }: { noun: Noun }) {
  const { project = null } = useParams();
  const navigate = useNavigate();
  const queries = useQueryClient();
  const path = pathOf(noun, project);
  const { data, error, isPending, dataUpdatedAt } = useQuery({ queryKey: ["data", path], queryFn: () => all(path), refetchInterval: POLL_MS });
  const [chosen, setChosen] = useState<Set<string>>(new Set());
  const [asking, setAsking] = useState<Asking>(null);
  const [menu, setMenu] = useState<{ row: Row; anchor: HTMLElement } | null>(null);
  const [problem, setProblem] = useState<unknown>(null);
  const cannotChange = useRefusal(project, noun.key === "members" ? "admin" : "editor");
  const refusal = noun.key === "tokens" ? undefined : cannotChange;
  const refresh = () => queries.invalidateQueries({ queryKey: ["data"] });
  const rows = useMemo(() => data ?? [], [data]);
  const picked = rows.filter((row) => chosen.has(row.id));

  const destroy = async (doomed: Row[]) => {
    for (const row of doomed) await call("DELETE", pathOf(noun, project, row.id));
    setChosen(new Set());
    await refresh();
  };
  const act = async (row: Row, action: Action, body: unknown = undefined) => {
    try {
      const answer = await call("POST", `${pathOf(noun, project, row.id)}/${action.verb}`, body);
      setProblem(null);
      setAsking("link" in answer.body && noun.key === "users" ? { kind: "shown", body: answer.body } : null);
    } catch (error_) {
      if (body !== undefined) throw error_;
      setProblem(error_);
    }
    await refresh();
  };
  const itemsOf = (row: Row): Item[] => {
    const items: Item[] = noun.actions.map((action) => ({
      key: action.verb, title: action.title, reason: refusal, isDanger: Boolean(action.danger),
      onAction: () => (action.operation || action.danger ? setAsking({ kind: "act", row, action }) : void act(row, action)),
    }));
    items.push({ key: "copy", title: "Copy id", onAction: () => void navigator.clipboard.writeText(row.id) });
    if (noun.remove) items.push({ key: "remove", title: noun.remove.title, reason: refusal, isDanger: true, onAction: () => setAsking({ kind: "destroy", rows: [row] }) });
    return items;
  };

  return (
    <>
      <div className="mb-4 flex flex-wrap items-center gap-3">
        <h1 className="m-0 text-xl font-semibold">{noun.title}</h1>
        {dataUpdatedAt > 0 && <Updated at={dataUpdatedAt} />}
        <span className="grow" />
        {picked.length > 0 && noun.remove && <Act tone="danger" reason={refusal} onPress={() => setAsking({ kind: "destroy", rows: picked })}>{noun.remove.title} {picked.length}</Act>}
        {noun.create && <Act tone="primary" reason={refusal} onPress={() => setAsking({ kind: "create" })}>New {noun.one}</Act>}
      </div>
      {problem !== null && <div className="mb-3"><Trouble problem={problem} /></div>}
      {error && <Trouble problem={error} />}
      {isPending && <p className="soft" role="status">Loading…</p>}
      {data && data.length === 0 && <Empty words={noun.empty} command={noun.first} />}
      {data && data.length > 0 && (
        <Table label={noun.title} columns={noun.columns} rows={rows} name={nameOf} link={(row) => (noun.key === "audit" ? null : linkOf(noun, project, row.id))} chosen={chosen} onChoose={setChosen} menu={(row) => <MenuButton label={`Actions of ${nameOf(row)}`} onOpen={(anchor) => setMenu({ row: row as Row, anchor })} />} />
      )}
      {menu && <RowMenu anchor={menu.anchor} label={`Actions of ${nameOf(menu.row)}`} items={itemsOf(menu.row)} onClose={() => setMenu(null)} />}
      {asking?.kind === "create" && noun.create && (
        <Box title={`New ${noun.one}`} onClose={() => setAsking(null)}>
          <Form operation={noun.create} submit="Create" onSubmit={async (body) => {
            const made = await call("POST", path, body);
            await refresh();
            if ("secret" in made.body || "link" in made.body) setAsking({ kind: "shown", body: made.body });
            else navigate(linkOf(noun, inProject(noun) ? project : null, made.body.id));
          }} />
        </Box>
      )}
      {asking?.kind === "act" && asking.action.operation && (
        <Box title={`${asking.action.title} ${nameOf(asking.row)}`} onClose={() => setAsking(null)}>
          <Form operation={asking.action.operation} submit={asking.action.title} onSubmit={(body) => act(asking.row, asking.action, body)} />
        </Box>
      )}
      {asking?.kind === "act" && asking.action.danger && <Destroy verb={asking.action.title} names={[nameOf(asking.row)]} blast={asking.action.danger} onClose={() => setAsking(null)} onDo={() => act(asking.row, asking.action)} />}
      {asking?.kind === "destroy" && noun.remove && <Destroy verb={noun.remove.title} names={asking.rows.map(nameOf)} blast={noun.remove.blast} onClose={() => setAsking(null)} onDo={() => destroy(asking.rows)} />}
      {asking?.kind === "shown" && <Secret body={asking.body} onClose={() => setAsking(null)} />}
    </>
  );
}

/** What is shown this once. */
function Secret({ body, onClose }: { body: Row; onClose: () => void }) {
  const text = String(body.secret ?? body.link ?? "");
  const shown = text.startsWith("/") ? `${window.location.origin}${text}` : text;
  return (
    <Box title="Shown this once" onClose={onClose}>
      <p>Keep it now: it is stored as a digest and cannot be shown again.</p>
      <pre className="card overflow-auto p-3" tabIndex={0}>{shown}</pre>
      <Act tone="primary" onPress={() => void navigator.clipboard.writeText(shown)}>Copy</Act>
    </Box>
  );
}
