/** Signing in: by name and password, or the first time by a one-time link. */
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { type ReactNode, useState } from "react";
import { useNavigate } from "react-router";
import { api } from "../api/client";
import { Problem } from "../api/problem";
import { Trouble } from "../parts/basics";

function Frame({ title, children }: { title: string; children: ReactNode }) {
  return (
    <div role="main" className="mx-auto mt-[12vh] max-w-sm p-4">
      <div className="card p-6">
        <h1 className="m-0 mb-4 text-xl font-semibold">{title}</h1>
        {children}
      </div>
    </div>
  );
}

function Text({ label, value, onChange, ...more }: { label: string; value: string; onChange: (text: string) => void; type?: string; autoComplete?: string; inputMode?: "numeric" }) {
  return (
    <label className="block">
      {label}
      <input className="field mt-1" required value={value} onChange={(event) => onChange(event.target.value)} {...more} />
    </label>
  );
}

export function SignIn() {
  const queries = useQueryClient();
  const [name, setName] = useState("");
  const [password, setPassword] = useState("");
  const [code, setCode] = useState("");
  const [needsCode, setNeedsCode] = useState(false);
  const refused = new URLSearchParams(window.location.search).get("refused");
  const [problem, setProblem] = useState<unknown>(refused && new Problem(401, refused, "The sign-in by the provider was refused", "", ""));
  const { data: methods } = useQuery({ queryKey: ["methods"], queryFn: async () => (await api.GET("/v1/sessions/methods")).data ?? null, staleTime: Infinity });
  const send = async () => {
    setProblem(null);
    try {
      await api.POST("/v1/sessions", { body: { name, password, ...(code ? { code } : {}) } });
      await queries.invalidateQueries();
    } catch (error) {
      if (error instanceof Problem && error.code === "session.code_needed") setNeedsCode(true);
      else setProblem(error);
    }
  };
  return (
    <Frame title="Sign in to Bedplate">
      <form className="grid gap-3" onSubmit={(event) => { event.preventDefault(); void send(); }}>
        <Text label="Name" value={name} onChange={setName} autoComplete="username" />
        <Text label="Password" type="password" value={password} onChange={setPassword} autoComplete="current-password" />
        {needsCode && <Text label="One-time code" value={code} onChange={setCode} autoComplete="one-time-code" inputMode="numeric" />}
        {problem !== null && <Trouble problem={problem} />}
        <button type="submit" className="button primary justify-center">Sign in</button>
        {methods?.sso && <a className="button justify-center" href={`${methods.sso.path}?next=${encodeURIComponent(window.location.pathname + (refused ? "" : window.location.search))}`}>Sign in by {methods.sso.name}</a>}
        <p className="m-0 text-xs soft">Nobody has signed in yet? <code>bedplate up</code> keeps the first operator's link in <code>operator-link</code> in its state directory.</p>
      </form>
    </Frame>
  );
}

export function Welcome() {
  const queries = useQueryClient();
  const navigate = useNavigate();
  const [password, setPassword] = useState("");
  const [again, setAgain] = useState("");
  const [problem, setProblem] = useState<unknown>(null);
  const send = async () => {
    if (password !== again) return setProblem(new Problem(422, "console.differ", "The two passwords differ", "", ""));
    try {
      await api.POST("/v1/sessions/redeem", { body: { link: window.location.hash.slice(1), password } });
      await queries.invalidateQueries();
      navigate("/", { replace: true });
    } catch (error) {
      setProblem(error);
    }
  };
  return (
    <Frame title="Choose a password">
      <form className="grid gap-3" onSubmit={(event) => { event.preventDefault(); void send(); }}>
        <Text label="Password, at least 12 characters" type="password" value={password} onChange={setPassword} autoComplete="new-password" />
        <Text label="Once more" type="password" value={again} onChange={setAgain} autoComplete="new-password" />
        {problem !== null && <Trouble problem={problem} />}
        <button type="submit" className="button primary justify-center">Open the account</button>
      </form>
    </Frame>
  );
}
