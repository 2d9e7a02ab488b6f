// The contracts, read from proto/ at run time, and what their messages have in common.
import { existsSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import { loadSync, type Options } from "@grpc/proto-loader";

export interface ToolCall { id: string; name: string; arguments: string }
/** A message. Send each reply back as it came: then its exact tokens are kept. */
export interface Message { role: string; content?: string; tool_calls?: ToolCall[]; tool_call_id?: string; reasoning?: string }
export interface Tool { name: string; description?: string; parameters?: Record<string, unknown> }

// The types of messages that are read at run time are not known to the compiler.
// eslint-disable-next-line @typescript-eslint/no-explicit-any
export type Wire = any;

/** Folder of the contracts: `proto` above this file, or SLUICE_PROTOS. */
function protos(): string {
  for (let folder = dirname(fileURLToPath(import.meta.url)); ; folder = dirname(folder)) {
    const found = process.env.SLUICE_PROTOS ?? join(folder, "proto");
    if (existsSync(join(found, "sluice/v1/episode.proto"))) return found;
    if (folder === dirname(folder) || process.env.SLUICE_PROTOS) throw new Error(`${found} has no sluice/v1/episode.proto: set SLUICE_PROTOS to the folder proto of Sluice`);
  }
}

/** Loads one file of the contracts; returns its services by name. */
export function load(file: string, options: Options = {}): Wire {
  const loaded = loadSync([`sluice/v1/${file}.proto`], {
    keepCase: true, includeDirs: [protos()], longs: Number, enums: String, defaults: true, oneofs: true, ...options,
  });
  return (grpc.loadPackageDefinition(loaded) as Wire).sluice.v1;
}

/** google.protobuf.Struct to a plain object and back. proto-loader has no conversion, and its own names for the fields of Struct. */
export function plain(data: Wire): Record<string, unknown> {
  return Object.fromEntries(Object.entries(data?.fields ?? {}).map(([key, each]) => [key, unboxed(each)]));
}

export function struct(object: Record<string, unknown>): Wire {
  return { fields: Object.fromEntries(Object.entries(object).map(([key, each]) => [key, boxed(each)])) };
}

function unboxed(value: Wire): unknown {
  if (value.structValue) return plain(value.structValue);
  if (value.listValue) return value.listValue.values.map(unboxed);
  return value.kind === "nullValue" ? null : value[value.kind];
}

function boxed(value: unknown): Wire {
  if (Array.isArray(value)) return { listValue: { values: value.map(boxed) } };
  if (value && typeof value === "object") return { structValue: struct(value as Record<string, unknown>) };
  if (typeof value === "number") return { numberValue: value };
  if (typeof value === "boolean") return { boolValue: value };
  return value === null || value === undefined ? { nullValue: "NULL_VALUE" } : { stringValue: String(value) };
}
