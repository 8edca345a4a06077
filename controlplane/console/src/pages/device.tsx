/** Letting a program in that shows a code (`bedplate login`). */
import { type ReactNode, useState } from "react";
import { useSearchParams } from "react-router";
import { api } from "../api/client";
import type { components } from "../api/schema";
import { Trouble } from "../parts/basics";

type Login = components["schemas"]["LoginView"];
const WORDS = { approved: "It is let in. You may close this page.", denied: "It was refused. You may close this page." };

export function Device({ name }: { name: string }) {
  const [query] = useSearchParams();
  const [code, setCode] = useState(query.get("code") ?? "");
  const [login, setLogin] = useState<Login | null>(null);
  const [problem, setProblem] = useState<unknown>(null);
  const ask = async (question: () => Promise<{ data?: Login }>) => {
    setProblem(null);
    try {
      setLogin((await question()).data ?? null);
    } catch (error) {
      setProblem(error);
    }
  };
  const params = { path: { login: code } };
  let body: ReactNode = (
    <form className="grid gap-3" onSubmit={(event) => { event.preventDefault(); void ask(() => api.GET("/v1/logins/{login}", { params })); }}>
      <label className="block">
        Code
        <input className="field mt-1 font-mono" required autoComplete="off" value={code} onChange={(event) => setCode(event.target.value)} />
      </label>
      <button type="submit" className="button primary justify-center">Look at it</button>
    </form>
  );
  if (login?.state === "pending") {
    body = (
      <div className="grid gap-3">
        <p className="m-0">
          <strong>{login.client_name}</strong> at {login.client_address} asks to act as <strong>{name}</strong>.
        </p>
        <p className="m-0 text-xs soft">Approve it only if you began this yourself and it shows the code {login.user_code}. Its token is listed under Tokens and can be revoked there.</p>
        <button type="button" className="button primary justify-center" onClick={() => void ask(() => api.POST("/v1/logins/{login}/approve", { params }))}>Approve</button>
        <button type="button" className="button justify-center" onClick={() => void ask(() => api.POST("/v1/logins/{login}/deny", { params }))}>Deny</button>
      </div>
    );
  } else if (login) {
    body = <p className="m-0" role="status">{WORDS[login.state]}</p>;
  }
  return (
    <div role="main" className="mx-auto mt-[12vh] max-w-sm p-4">
      <div className="card grid gap-4 p-6">
        <h1 className="m-0 text-xl font-semibold">Let a program in</h1>
        {body}
        {problem !== null && <Trouble problem={problem} />}
      </div>
    </div>
  );
}
