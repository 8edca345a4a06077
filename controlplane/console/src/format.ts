/** Values as people read them. */
import type { Kind } from "./nouns";

export function at(row: Record<string, unknown>, path: string): unknown {
  return path.split(".").reduce<unknown>((value, key) => (value as Record<string, unknown> | null | undefined)?.[key], row);
}

const UNITS: [number, string][] = [[86_400, "d"], [3_600, "h"], [60, "min"], [1, "s"]];

export function ago(time: string, now = Date.now()): string {
  const seconds = Math.round((now - Date.parse(time)) / 1000);
  const [size, unit] = UNITS.find(([limit]) => Math.abs(seconds) >= limit) ?? [1, "s"];
  const words = `${Math.floor(Math.abs(seconds) / size)} ${unit}`;
  return seconds < 0 ? `in ${words}` : `${words} ago`;
}

export function bytes(value: number): string {
  const steps = ["B", "KiB", "MiB", "GiB", "TiB"];
  const step = value > 0 ? Math.min(Math.floor(Math.log2(value) / 10), steps.length - 1) : 0;
  return `${(value / 2 ** (10 * step)).toFixed(step && value / 2 ** (10 * step) < 10 ? 1 : 0)} ${steps[step]}`;
}

/** What a cell says, also what is sorted and searched by. */
export function words(value: unknown, kind?: Kind): string {
  if (value === null || value === undefined || value === "") return "–";
  if (kind === "time") return ago(String(value));
  if (kind === "bytes") return bytes(Number(value));
  if (kind === "yes") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.every((item) => typeof item === "string") ? value.join(", ") || "–" : String(value.length);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

export function compare(left: unknown, right: unknown): number {
  if (typeof left === "number" && typeof right === "number") return left - right;
  return String(left ?? "").localeCompare(String(right ?? ""), undefined, { numeric: true });
}

const GOOD = new Set(["running", "ready", "up", "active", "serving", "available", "succeeded", "online", "resolved", "imported", "connected"]);
const BAD = new Set(["failed", "lost", "down", "error", "open", "unreachable", "parked", "missing"]);

export const toneOf = (state: string): "good" | "bad" | "moving" => (GOOD.has(state) ? "good" : BAD.has(state) ? "bad" : "moving");
