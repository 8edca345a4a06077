/** One thing: what is wanted beside what is seen, conditions with reasons, what happened, and the same call by API and CLI. */
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { Tab, TabList, TabPanel, Tabs } from "react-aria-components";
import { useNavigate, useParams } from "react-router";
import { type Answer, call, type Json, type Row } from "../api/client";
import { Problem } from "../api/problem";
import { useRefusal } from "../api/session";
import { ago } from "../format";
import { inProject, linkOf, nameOf, type Noun, pathOf } from "../nouns";
import { Act, Copy, State, Trouble, Updated } from "../parts/basics";
import { Box, Destroy } from "../parts/dialog";
import { Form } from "../parts/form";

const POLL_MS = 5_000;
const APART = new Set(["wanted", "observed", "conditions", "progress"]);

type Condition = { type: string; status: string | boolean; reason?: string; message?: string };
type Progress = { step?: string; deadline_at?: string; attempt?: number; detail?: string } | null;

export function Detail({ noun }: { noun: Noun }) {
  const { project = null, id = "" } = useParams();
  const navigate = useNavigate();
  const queries = useQueryClient();
  const path = pathOf(noun, project, id);
  const { data, error, dataUpdatedAt } = useQuery<Answer, Problem>({ queryKey: ["data", path], queryFn: () => call("GET", path), refetchInterval: POLL_MS, retry: false });
  const [asking, setAsking] = useState<"update" | "destroy" | null>(null);
  const cannotChange = useRefusal(project, noun.key === "members" ? "admin" : "editor");
  const refusal = noun.key === "tokens" ? undefined : cannotChange;
  if (error && !data) return <Trouble problem={error} />;
  if (!data) return <p role="status" className="soft">Loading…</p>;
  const row = data.body;
  const state = String(row.status ?? row.state ?? "");
  return (
    <>
      <div className="mb-4 flex flex-wrap items-center gap-3">
        <h1 className="m-0 text-xl font-semibold">{nameOf(row)}</h1>
        {state && <State value={state} />}
        <code className="soft">{row.id}</code> <Copy text={row.id} label="Copy the id" />
        <Updated at={dataUpdatedAt} />
        <span className="grow" />
        {noun.update && <Act reason={refusal} onPress={() => setAsking("update")}>Change</Act>}
        {noun.remove && <Act tone="danger" reason={refusal} onPress={() => setAsking("destroy")}>{noun.remove.title}</Act>}
      </div>
      {error && <div className="mb-3"><Trouble problem={error} /></div>}
      <Running progress={(row.progress ?? null) as unknown as Progress} />
      <Conditions conditions={(row.conditions ?? []) as unknown as Condition[]} />
      <Tabs>
        <TabList aria-label="Views" className="mb-3 flex gap-4 border-b border-(--line)">
          {["Overview", "Operations", "API", "CLI"].map((title) => <Tab key={title} id={title} className="cursor-pointer border-b-2 border-transparent px-1 py-2 data-[selected]:border-(--accent)">{title}</Tab>)}
        </TabList>
        <TabPanel id="Overview"><Overview row={row} /></TabPanel>
        <TabPanel id="Operations"><Operations subject={row.id} /></TabPanel>
        <TabPanel id="API"><Snippet text={`curl -H "Authorization: Bearer $BEDPLATE_TOKEN" \\\n  ${window.location.origin}${path}`} /></TabPanel>
        <TabPanel id="CLI"><Snippet text={`bedplate ${noun.cli} show ${String(row.name ?? row.user_name ?? row.id)}${inProject(noun) ? ` --project ${project}` : ""} -o yaml`} /></TabPanel>
      </Tabs>
      {asking === "update" && noun.update && <Change noun={noun} path={path} data={data} onClose={() => { setAsking(null); void queries.invalidateQueries({ queryKey: ["data"] }); }} />}
      {asking === "destroy" && noun.remove && (
        <Destroy verb={noun.remove.title} names={[nameOf(row)]} blast={noun.remove.blast} onClose={() => setAsking(null)} onDo={async () => {
          await call("DELETE", path);
          await queries.invalidateQueries({ queryKey: ["data"] });
          navigate(linkOf(noun, project));
        }} />
      )}
    </>
  );
}

function Running({ progress }: { progress: Progress }) {
  if (!progress?.step) return null;
  return (
    <p className="card mb-3 p-3" role="status">
      Step <strong>{progress.step}</strong>
      {progress.attempt && progress.attempt > 1 ? `, try ${progress.attempt}` : ""}
      {progress.deadline_at && <span className="soft">, to be left {ago(progress.deadline_at)}</span>}
      {progress.detail && <span className="soft">: {progress.detail}</span>}
    </p>
  );
}

function Conditions({ conditions }: { conditions: Condition[] }) {
  if (!conditions.length) return null;
  return (
    <ul className="mb-4 grid list-none gap-1 p-0" aria-label="Conditions">
      {conditions.map((item) => (
        <li key={item.type}>
          <State value={String(item.status).toLowerCase() === "true" ? "ready" : "waiting"} /> <strong>{item.type}</strong>{" "}
          {item.reason && <code>{item.reason}</code>} <span className="soft">{item.message}</span>
        </li>
      ))}
    </ul>
  );
}

function Value({ value }: { value: Json | undefined }) {
  if (value === null || value === undefined || value === "") return <span className="soft">–</span>;
  if (typeof value !== "object") return <>{String(value)}</>;
  return <pre className="m-0 max-h-64 overflow-auto whitespace-pre-wrap" tabIndex={0}>{JSON.stringify(value, null, 2)}</pre>;
}

function Overview({ row }: { row: Row }) {
  const { wanted, observed } = row as Record<string, Json>;
  const asMap = (value: Json | undefined) => (value && typeof value === "object" && !Array.isArray(value) ? value : {});
  const keys = [...new Set([...Object.keys(asMap(wanted)), ...Object.keys(asMap(observed))])];
  return (
    <div className="grid gap-4">
      {keys.length > 0 && (
        <table className="card w-full border-collapse">
          <thead><tr>{["", "Wanted", "Observed"].map((title) => <th key={title} scope="col" className="border-b border-(--line) px-3 py-2 text-left font-medium">{title || <span className="sr-only">Field</span>}</th>)}</tr></thead>
          <tbody>{keys.map((key) => <tr key={key} className="border-b border-(--line) align-top last:border-0"><th scope="row" className="px-3 py-2 text-left font-normal soft">{key.replaceAll("_", " ")}</th><td className="px-3 py-2"><Value value={asMap(wanted)[key]} /></td><td className="px-3 py-2"><Value value={asMap(observed)[key]} /></td></tr>)}</tbody>
        </table>
      )}
      <dl className="card m-0 grid grid-cols-[max-content_1fr] gap-x-6 gap-y-1 p-4">
        {Object.entries(row).filter(([key]) => !APART.has(key)).map(([key, value]) => (
          <div key={key} className="contents"><dt className="soft">{key.replaceAll("_", " ")}</dt><dd className="m-0 min-w-0"><Value value={value} /></dd></div>
        ))}
      </dl>
    </div>
  );
}

function Operations({ subject }: { subject: string }) {
  const path = `/v1/operations?filter=${encodeURIComponent(`subject_id=${subject}`)}&limit=20&sort=-created_at`;
  const { data, error } = useQuery({ queryKey: ["data", path], queryFn: () => call("GET", path) });
  if (error) return <Trouble problem={error} />;
  const items = ((data?.body.items ?? []) as Row[]);
  if (data && !items.length) return <p className="soft">Nothing was asked of it yet.</p>;
  return (
    <ul className="card m-0 grid list-none gap-0 p-0">
      {items.map((item) => (
        <li key={item.id} className="border-b border-(--line) px-3 py-2 last:border-0">
          <State value={String(item.state)} /> <code>{String(item.action)}</code> <span className="soft">{ago(String(item.created_at))}</span>
          {item.error_code && <div style={{ color: "var(--bad)" }}><code>{String(item.error_code)}</code> {String(item.error_detail ?? "")}</div>}
          {((item.steps ?? []) as Row[]).length > 0 && <ol className="m-0 pl-5 text-xs soft">{(item.steps as unknown as Record<string, Json>[]).map((step, index) => <li key={index}>{String(step.step ?? step.name)} {step.code ? <code>{String(step.code)}</code> : null}</li>)}</ol>}
        </li>
      ))}
    </ul>
  );
}

function Snippet({ text }: { text: string }) {
  return <div className="card p-3"><pre className="m-0 mb-2 overflow-auto" tabIndex={0}>{text}</pre><Copy text={text} label="Copy" /></div>;
}

/** Changes what it was told when the form was opened; somebody else's change in between is shown, never overwritten unseen. */
function Change({ noun, path, data, onClose }: { noun: Noun; path: string; data: Answer; onClose: () => void }) {
  const [base, setBase] = useState(data);
  const [clash, setClash] = useState<{ mine: Record<string, Json>; theirs: Answer } | null>(null);
  const flat = { ...base.body, ...((base.body.wanted ?? {}) as Record<string, Json>) };
  return (
    <Box title={`Change ${nameOf(base.body)}`} onClose={onClose}>
      {clash && (
        <div role="alert" className="card mb-3 p-3">
          <strong>Somebody changed it meanwhile.</strong> Your change is not made yet.
          <table className="w-full"><thead><tr><th scope="col" className="text-left">Field</th><th scope="col" className="text-left">Now</th><th scope="col" className="text-left">Yours</th></tr></thead>
            <tbody>{Object.entries(clash.mine).map(([key, value]) => <tr key={key}><th scope="row" className="text-left font-normal">{key}</th><td><Value value={({ ...clash.theirs.body, ...((clash.theirs.body.wanted ?? {}) as Record<string, Json>) } as Record<string, Json>)[key]} /></td><td><Value value={value} /></td></tr>)}</tbody>
          </table>
          <Act onPress={() => { setBase(clash.theirs); setClash(null); }}>Save mine over it</Act>
        </div>
      )}
      <Form operation={noun.update ?? ""} submit="Save" onlyChanged initial={flat as Record<string, Json>} onSubmit={async (body) => {
        try {
          await call("PATCH", path, body, base.etag);
          onClose();
        } catch (error) {
          if (!(error instanceof Problem) || error.status !== 412) throw error;
          setClash({ mine: body, theirs: await call("GET", path) });
        }
      }} />
    </Box>
  );
}
