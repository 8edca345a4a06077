/** Small parts that every page uses. */
import { type ReactNode, useEffect, useState } from "react";
import { Button, Tooltip, TooltipTrigger } from "react-aria-components";
import { Problem } from "../api/problem";
import { toneOf } from "../format";

/** Like a button; with a reason it does nothing and says why, and stays reachable by keyboard. */
export function Act({ children, onPress, reason, tone = "" }: { children: ReactNode; onPress: () => void; reason?: string | undefined; tone?: string }) {
  const button = (
    <Button className={`button ${tone}`} {...(reason ? { "aria-disabled": true } : {})} onPress={() => !reason && onPress()}>
      {children}
    </Button>
  );
  if (!reason) return button;
  return (
    <TooltipTrigger delay={100}>
      {button}
      <Tooltip className="card px-2 py-1 text-xs">{reason}</Tooltip>
    </TooltipTrigger>
  );
}

const MARKS = { good: "●", bad: "▲", moving: "◐" };

export function State({ value }: { value: string }) {
  const tone = toneOf(value);
  return (
    <span style={{ color: `var(--${tone})` }} className="whitespace-nowrap">
      <span aria-hidden="true">{MARKS[tone]}</span> {value}
    </span>
  );
}

export function Copy({ text, label }: { text: string; label: string }) {
  const [isDone, setDone] = useState(false);
  useEffect(() => {
    if (!isDone) return;
    const timer = window.setTimeout(() => setDone(false), 1500);
    return () => window.clearTimeout(timer);
  }, [isDone]);
  const copy = () => void navigator.clipboard.writeText(text).then(() => setDone(true));
  return (
    <Button className="button px-2 py-0.5 text-xs" aria-label={label} onPress={copy}>
      {isDone ? "copied" : "copy"}
    </Button>
  );
}

export function Trouble({ problem }: { problem: unknown }) {
  const known = problem instanceof Problem ? problem : new Problem(0, "console", "The console failed", String(problem), "");
  return (
    <div role="alert" className="card p-3" style={{ borderColor: "var(--bad)" }}>
      <strong>{known.title}</strong>
      {known.detail && known.detail !== known.title && <p className="m-0">{known.detail}</p>}
      <p className="m-0 text-xs soft">
        <code>{known.code}</code> {known.requestId && <>request {known.requestId}</>}
      </p>
    </div>
  );
}

/** "updated 2 s ago", counted while one looks. */
export function Updated({ at }: { at: number }) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = window.setInterval(() => setNow(Date.now()), 1000);
    return () => window.clearInterval(timer);
  }, []);
  return <span className="text-xs soft">updated {Math.max(0, Math.round((now - at) / 1000))} s ago</span>;
}

export function Empty({ words, command }: { words: string; command: string }) {
  return (
    <div className="card p-8 text-center">
      <p className="m-0 mb-3">{words}</p>
      <p className="m-0 inline-flex items-center gap-2">
        <code>{command}</code> <Copy text={command} label="Copy the command" />
      </p>
    </div>
  );
}
