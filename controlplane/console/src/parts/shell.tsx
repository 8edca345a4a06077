/** The frame around every page: where one is, in which project, as whom. */
import { useQuery } from "@tanstack/react-query";
import { type ReactNode, useEffect, useState } from "react";
import { NavLink, useLocation, useNavigate, useParams } from "react-router";
import { all } from "../api/client";
import type { Live } from "../api/live";
import { type Me, useSignOut } from "../api/session";
import { inProject, linkOf, NOUNS, type Noun } from "../nouns";
import { Palette } from "./palette";

const GROUPS = ["Compute", "Network", "Inference", "Project", "Operator"] as const;
const LIVE: Record<Live, string> = { connecting: "connecting", live: "live", polling: "cut off; asking every few seconds" };

function useTheme(): [string, () => void] {
  const preferred = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const [theme, setTheme] = useState(localStorage.getItem("bedplate.theme") ?? preferred);
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
  }, [theme]);
  const turn = () => {
    const next = theme === "dark" ? "light" : "dark";
    localStorage.setItem("bedplate.theme", next);
    setTheme(next);
  };
  return [theme, turn];
}

export function Shell({ me, live, children }: { me: Me; live: Live; children: ReactNode }) {
  const { project: inUrl } = useParams();
  const [project, setProject] = useState(localStorage.getItem("bedplate.project") ?? "");
  const { data: projects } = useQuery({ queryKey: ["data", "/v1/projects"], queryFn: () => all("/v1/projects") });
  const names = (projects ?? []).map((row) => String(row.name));
  const here = inUrl ?? (names.includes(project) ? project : (names[0] ?? "default"));
  const [theme, turnTheme] = useTheme();
  const signOut = useSignOut();
  const navigate = useNavigate();
  const { pathname } = useLocation();
  useEffect(() => {
    if (inUrl) {
      localStorage.setItem("bedplate.project", inUrl);
      setProject(inUrl);
    }
  }, [inUrl]);
  const isSeen = (noun: Noun) => noun.group !== "Operator" || me.is_operator;
  const choose = (name: string) => navigate(inUrl ? pathname.replace(/^\/p\/[^/]+/, `/p/${encodeURIComponent(name)}`) : `/p/${encodeURIComponent(name)}`);
  return (
    <div className="grid min-h-screen grid-cols-[14rem_1fr] max-md:grid-cols-1">
      <a href="#main" className="sr-only focus:not-sr-only">Skip to the page</a>
      <nav aria-label="Main" className="border-r border-(--line) p-3 max-md:border-b">
        <NavLink to={`/p/${here}`} end className="mb-3 block px-2 text-lg font-semibold text-inherit no-underline">Bedplate</NavLink>
        <label className="mb-3 block px-2 text-xs soft">
          Project
          <select className="field mt-1" value={here} onChange={(event) => choose(event.target.value)}>
            {(names.includes(here) ? names : [here, ...names]).map((name) => <option key={name}>{name}</option>)}
          </select>
        </label>
        {GROUPS.map((group) => {
          const nouns = NOUNS.filter((noun) => noun.group === group && isSeen(noun));
          return nouns.length > 0 && (
            <div key={group} className="mb-3">
              <h2 className="m-0 px-2 text-xs font-semibold soft">{group}</h2>
              <ul className="m-0 list-none p-0">
                {nouns.map((noun) => <li key={noun.key}><NavLink to={linkOf(noun, inProject(noun) ? here : null)} className="block rounded px-2 py-0.5 text-inherit no-underline hover:bg-(--card) aria-[current=page]:bg-(--card) aria-[current=page]:font-medium">{noun.title}</NavLink></li>)}
              </ul>
            </div>
          );
        })}
      </nav>
      <div className="min-w-0">
        <header className="flex items-center gap-3 border-b border-(--line) px-5 py-2">
          <Palette project={here} isSeen={isSeen} />
          <span className="text-xs soft" role="status">{LIVE[live]}</span>
          <span className="grow" />
          <button type="button" className="button" onClick={turnTheme}>{theme === "dark" ? "Light" : "Dark"}</button>
          <span>{me.display_name || me.name}</span>
          <button type="button" className="button" onClick={() => void signOut()}>Sign out</button>
        </header>
        <main id="main" className="p-5">{children}</main>
      </div>
    </div>
  );
}
