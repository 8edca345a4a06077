/** Which page stands at which address. */
import { useEffect, useRef } from "react";
import { Dialog, Modal, ModalOverlay } from "react-aria-components";
import { Navigate, Route, Routes, useLocation } from "react-router";
import { useLive } from "./api/live";
import { type Me, useMe } from "./api/session";
import { inProject, NOUNS } from "./nouns";
import { Detail } from "./pages/detail";
import { Device } from "./pages/device";
import { List } from "./pages/list";
import { Overview } from "./pages/overview";
import { SignIn, Welcome } from "./pages/sign-in";
import { Trouble } from "./parts/basics";
import { Shell } from "./parts/shell";

export function App() {
  const { data: present, error, isPending } = useMe();
  const last = useRef<Me | null>(null);
  const isAnother = Boolean(present && last.current && present.id !== last.current.id);
  useEffect(() => {
    if (isAnother) window.location.assign("/"); // nothing of the former person's page or cache stays
  }, [isAnother]);
  if (present && !isAnother) last.current = present;
  const me = present ?? last.current;
  const live = useLive(Boolean(present));
  const { pathname } = useLocation();
  if (pathname === "/welcome") return <Welcome />;
  if (isPending || isAnother) return null;
  if (error && !me) return <main className="p-8"><Trouble problem={error} /></main>;
  if (!me) return <SignIn />;
  const first = localStorage.getItem("bedplate.project") ?? me.memberships[0]?.project ?? "default";
  // A session that ended while somebody was typing: the page stays as it is, and the sign-in lies over it.
  return (
    <>
      {present === null && (
        <ModalOverlay isOpen className="fixed inset-0 z-40 bg-black/60">
          <Modal><Dialog aria-label="Sign in again" className="outline-none"><SignIn /></Dialog></Modal>
        </ModalOverlay>
      )}
    <Routes>
      <Route path="/" element={<Navigate to={`/p/${encodeURIComponent(first)}`} replace />} />
      <Route path="/p/:project" element={<Shell me={me} live={live}><Overview /></Shell>} />
      {NOUNS.flatMap((noun) => {
        const base = `${inProject(noun) ? "/p/:project" : ""}/${noun.key}`;
        return [
          <Route key={noun.key} path={base} element={<Shell me={me} live={live}><List key={noun.key} noun={noun} /></Shell>} />,
          <Route key={`${noun.key}-one`} path={`${base}/:id`} element={<Shell me={me} live={live}><Detail noun={noun} /></Shell>} />,
        ];
      })}
      <Route path="/device" element={<Device name={me.name} />} />
      <Route path="*" element={<Shell me={me} live={live}><h1 className="text-xl">There is no such page</h1></Shell>} />
    </Routes>
    </>
  );
}
