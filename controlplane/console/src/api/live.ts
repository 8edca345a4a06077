/** Events as they happen: what changed is read anew. A cut stream goes on behind the last event it saw. */
import { useQueryClient } from "@tanstack/react-query";
import { useEffect, useState } from "react";
import { SIGNED_OUT } from "./client";

const SETTLE_MS = 150; // a storm of events reads the lists once
const LONGEST_WAIT_MS = 15_000;
const REOPEN_MS = 500;

export type Live = "connecting" | "live" | "polling";

export function useLive(isSignedIn: boolean): Live {
  const queries = useQueryClient();
  const [state, setState] = useState<Live>("connecting");
  useEffect(() => {
    if (!isSignedIn) return;
    const ending = new AbortController();
    let timer: number | undefined;
    const onEvent = () => {
      window.clearTimeout(timer);
      timer = window.setTimeout(() => void queries.invalidateQueries({ queryKey: ["data"] }), SETTLE_MS);
    };
    void follow(ending.signal, onEvent, setState);
    return () => {
      window.clearTimeout(timer);
      ending.abort();
    };
  }, [isSignedIn, queries]);
  return state;
}

async function follow(signal: AbortSignal, onEvent: () => void, setState: (state: Live) => void): Promise<void> {
  let position = "";
  for (let failures = 0; !signal.aborted; failures += 1) {
    try {
      const query = position ? `?after=${position}` : "";
      const response = await fetch(`/v1/events${query}`, { signal, credentials: "same-origin" });
      if (response.status === 401) {
        window.dispatchEvent(new Event(SIGNED_OUT));
        return;
      }
      if (response.ok && response.body) {
        setState("live");
        onEvent();
        failures = 0;
        for await (const { id, isEvent } of ids(response.body)) {
          position = id;
          if (isEvent) onEvent();
        }
        await new Promise((done) => setTimeout(done, REOPEN_MS));
        continue; // it ended in order, as it does when rights change
      }
    } catch {
      if (signal.aborted) return;
    }
    setState("polling");
    await new Promise((done) => setTimeout(done, Math.min(500 * 2 ** failures, LONGEST_WAIT_MS)));
  }
}

/** The positions in a stream; one without data is no event, and says from where to go on. */
async function* ids(body: ReadableStream<Uint8Array>): AsyncGenerator<{ id: string; isEvent: boolean }> {
  const reader = body.pipeThrough(new TextDecoderStream() as unknown as ReadableWritablePair<string, Uint8Array>).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop() ?? "";
    for (const block of blocks) {
      const id = /^id: (\d+)$/m.exec(block)?.[1];
      if (id) yield { id, isEvent: /^data: /m.test(block) };
    }
  }
}
