/** A form made of an operation's body in the OpenAPI document: labels, help, examples and bounds are the API's own. */
import { useState } from "react";
import { Button } from "react-aria-components";
import type { Json } from "../api/client";
import forms from "../api/forms.json";
import { Problem } from "../api/problem";
import { Trouble } from "./basics";

export type Field = {
  name: string; kind: string; isRequired: boolean; isNullable: boolean; help: string; example: Json; initial: Json; choices: string[];
  minimum: number | null; maximum: number | null;
};

export const fieldsOf = (operation: string): Field[] => (forms as unknown as Record<string, Field[]>)[operation] ?? [];

function shown(value: Json | undefined, field: Field): string {
  if (value === undefined || value === null) return "";
  if (field.kind === "texts" && Array.isArray(value)) return value.join("\n");
  return typeof value === "object" ? JSON.stringify(value, null, 2) : String(value);
}

/** The value of what was typed; undefined when nothing was. Throws what is wrong in words. */
export function read(text: string, field: Field): Json | undefined {
  const trimmed = text.trim();
  if (trimmed === "") return undefined;
  switch (field.kind) {
    case "integer":
    case "number": {
      const units: Record<string, number> = { K: 2 ** 10, M: 2 ** 20, G: 2 ** 30, T: 2 ** 40 };
      const match = /^(-?[0-9.]+)\s*(?:([KMGT])i?B?)?$/i.exec(trimmed);
      if (!match) throw new Error("must be a number");
      return Number(match[1]) * (match[2] ? (units[match[2].toUpperCase()] ?? 1) : 1);
    }
    case "boolean":
      return trimmed === "true";
    case "texts":
      return trimmed.split("\n").map((line) => line.trim()).filter(Boolean);
    case "json":
      try {
        return JSON.parse(trimmed);
      } catch {
        throw new Error("must be JSON, like the example");
      }
    default:
      return trimmed;
  }
}

function Input({ field, value, onChange, wrong }: { field: Field; value: string; onChange: (text: string) => void; wrong: string | undefined }) {
  const id = `field-${field.name}`;
  const common = { id, className: "field mt-1", value, "aria-describedby": `${id}-help`, "aria-invalid": wrong ? true : undefined };
  const example = shown(field.example, field);
  if (field.kind === "choice" || field.kind === "boolean") {
    const choices = field.kind === "boolean" ? ["true", "false"] : field.choices;
    return (
      <select {...common} onChange={(event) => onChange(event.target.value)}>
        {(!field.isRequired || value === "") && <option value="">{field.initial === null ? "as the API chooses" : `${shown(field.initial, field)} (default)`}</option>}
        {choices.map((choice) => <option key={choice}>{choice}</option>)}
      </select>
    );
  }
  if (field.kind === "json" || field.kind === "texts")
    return <textarea {...common} rows={field.kind === "texts" ? 3 : 5} spellCheck={false} placeholder={example} onChange={(event) => onChange(event.target.value)} />;
  const type = field.name.includes("password") ? "password" : "text";
  return <input {...common} type={type} autoComplete="off" placeholder={example} onChange={(event) => onChange(event.target.value)} />;
}

type FormProps = {
  operation: string; submit: string; initial?: Record<string, Json>; onSubmit: (body: Record<string, Json>) => Promise<void>; onlyChanged?: boolean; hide?: string[];
};

export function Form({ operation, submit, initial = {}, onSubmit, onlyChanged = false, hide = [] }: FormProps) {
  const fields = fieldsOf(operation).filter((field) => !hide.includes(field.name)).sort((a, b) => Number(b.isRequired) - Number(a.isRequired) || Number(b.name === "name") - Number(a.name === "name"));
  const before = Object.fromEntries(fields.map((field) => [field.name, shown(initial[field.name], field)]));
  const [texts, setTexts] = useState<Record<string, string>>(before);
  const [wrong, setWrong] = useState<Record<string, string>>({});
  const [problem, setProblem] = useState<unknown>(null);
  const [isBusy, setBusy] = useState(false);

  const send = async () => {
    const body: Record<string, Json> = {};
    const bad: Record<string, string> = {};
    for (const field of fields) {
      const text = texts[field.name] ?? "";
      if (onlyChanged && text === before[field.name]) continue;
      try {
        const value = read(text, field);
        if (value !== undefined) body[field.name] = value;
        else if (onlyChanged && field.isNullable) body[field.name] = null;
        else if (field.isRequired) bad[field.name] = "is needed";
      } catch (error) {
        bad[field.name] = (error as Error).message;
      }
    }
    setWrong(bad);
    setProblem(null);
    if (Object.keys(bad).length) return;
    setBusy(true);
    try {
      await onSubmit(body);
    } catch (error) {
      setProblem(error);
      if (error instanceof Problem) setWrong(Object.fromEntries(fields.flatMap((field) => { const said = error.of(field.name); return said ? [[field.name, said]] : []; })));
    }
    setBusy(false);
  };

  return (
    <form className="grid gap-3" noValidate onSubmit={(event) => { event.preventDefault(); void send(); }}>
      {fields.map((field) => (
        <div key={field.name}>
          <label htmlFor={`field-${field.name}`} className="font-medium">{field.name.replaceAll("_", " ")}{field.isRequired && <span className="soft"> (needed)</span>}</label>
          <Input field={field} value={texts[field.name] ?? ""} wrong={wrong[field.name]} onChange={(text) => setTexts((all) => ({ ...all, [field.name]: text }))} />
          <p id={`field-${field.name}-help`} className="m-0 text-xs soft">
            {wrong[field.name] && <strong role="alert" style={{ color: "var(--bad)" }}>{wrong[field.name]}. </strong>}
            {field.help}
          </p>
        </div>
      ))}
      {problem !== null && <Trouble problem={problem} />}
      <div className="flex justify-end"><Button type="submit" className="button primary" isDisabled={isBusy}>{isBusy ? "…" : submit}</Button></div>
    </form>
  );
}
