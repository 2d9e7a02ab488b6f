// Plays episodes of a training run: lease a task, talk to the policy, give a reward.
//
//   const agent = new Agent("127.0.0.1:7105", "my-run");
//   await agent.run(async (episode) => {
//     const reply = await episode.generate([{ role: "user", content: "Guess a number." }]);
//     return reply.message.content === "7" ? 1 : 0;
//   }, { atATime: 16 });
//
// What an episode samples is recorded by the gateway, and trained when it was submitted. The contract is read from proto/ at run time.
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import grpc from "@grpc/grpc-js";
import { load, plain, struct, type Message, type Tool, type Wire } from "./contract.js";

export type { Message, Tool, ToolCall } from "./contract.js";
export interface Sampling { max_tokens?: number; temperature?: number; stop?: string[] }
export interface Reply { generationId: string; message: Message; finishReason: string; tokens: number }

/** A call that the gateway refused; `reason` is one of ErrorReason in proto/sluice/v1/errors.proto, without its prefix. */
export class SluiceError extends Error {
  constructor(readonly code: number, readonly reason: string, message: string, readonly retryAfterMs = 0) {
    super(message);
  }
}

const EpisodeService = load("episode").EpisodeService;

/** Seconds that the gateway waits for an offer before it answers that there is none. */
const WAIT_S = 30;
/** How often a lease is renewed within its time: two calls may be lost. */
const RENEWALS = 3;
/** Milliseconds that a call is repeated while no gateway answers. */
const PATIENCE_MS = 60_000;
/** Milliseconds that a lease may take, longer than a gateway holds it while the orchestrator restarts. */
const ANSWER_MS = 120_000;

/** One attempt at a task. */
export class Episode {
  readonly id: string;
  readonly openaiBaseUrl: string;
  readonly anthropicBaseUrl: string;
  /** API key for clients of OpenAI's and Anthropic's libraries: it samples, and neither rewards nor ends the episode. */
  readonly sessionKey: string;
  readonly #settlingKey: string;
  readonly taskId: string;
  readonly data: Record<string, unknown>;
  /** Messages to begin with, where the environment gives them. */
  readonly opening: Message[];
  /** Whether it was submitted or given up. */
  ended = false;

  constructor(private readonly agent: Agent, leased: Wire, opened: Wire) {
    this.id = opened.episode_id;
    [this.openaiBaseUrl, this.anthropicBaseUrl] = [opened.openai_base_url, opened.anthropic_base_url];
    [this.sessionKey, this.#settlingKey] = [opened.session_key, opened.settling_key];
    this.taskId = leased.task.task_id;
    this.data = plain(leased.task.data);
    this.opening = leased.opening?.messages ?? [];
  }

  /** Samples what the assistant says next; `messages` are all so far. */
  async generate(messages: Message[], options: { tools?: Tool[]; sampling?: Sampling; timeoutMs?: number } = {}): Promise<Reply> {
    const tools = (options.tools ?? []).map(({ parameters, ...tool }) => // as text too, which keeps the order of keys
      parameters ? { ...tool, parameters: struct(parameters), parameters_json: JSON.stringify(parameters) } : tool);
    const request = { episode_id: this.id, request_id: randomUUID(), conversation: { messages, tools }, sampling: options.sampling };
    const [made] = (await this.agent.call("Generate", request, { timeoutMs: options.timeoutMs ?? 600_000 })).generations;
    return {
      generationId: made.generation_id,
      message: made.message,
      finishReason: made.sample.finish_reason,
      tokens: made.sample.token_ids.length,
    };
  }

  /** Records a reward: of the episode, of one generation, or of the branch that ends with one. */
  async reward(value: number, target: { generation_id?: string; branch?: string } = {}): Promise<void> {
    await this.settle("RecordReward", { reward: value, ...target });
  }

  /** Ends the episode. Without a reward the recorded one counts, or the environment scores it. */
  async submit(reward?: number, truncated = false): Promise<string[]> {
    const { trajectory_ids } = await this.settle("SubmitTrajectory", { reward, truncated });
    this.ended = true;
    return trajectory_ids;
  }

  /** Gives the episode up. With `requeue` another attempt is offered. */
  async abandon(reason: string, requeue = false): Promise<void> {
    await this.settle("AbandonEpisode", { reason: reason.slice(0, 128), requeue });
    this.ended = true;
  }

  private settle(method: string, request: object): Promise<Wire> {
    return this.agent.call(method, { episode_id: this.id, ...request }, { key: this.#settlingKey });
  }
}

/** Leases and plays episodes through a gateway. */
export class Agent {
  private readonly client: Wire;
  private readonly metadata = new grpc.Metadata();
  private closed = false;

  constructor(target: string, private readonly runName: string, options: { token?: string; tokenFile?: string | undefined } = {}) {
    const token = options.token ?? (options.tokenFile && readFileSync(options.tokenFile, "utf8").trim());
    if (token) this.metadata.set("authorization", `Bearer ${token}`);
    this.client = new EpisodeService(target, grpc.credentials.createInsecure());
  }

  close(): void {
    this.closed = true;
    this.client.close();
  }

  /**
   * Plays episodes until the run has ended; returns how many were played to their end. What is under way then is left.
   * `play` returns the reward, or nothing if it was recorded or the environment scores it. If `play` throws, the episode is given up.
   */
  async run(play: (episode: Episode) => Promise<number | undefined>, { atATime = 8 }: { atATime?: number } = {}): Promise<number> {
    let [played, over] = [0, false];
    const work = async (): Promise<void> => {
      for (;;) {
        const leased = await this.lease();
        if (!leased || over) return;
        const renewing = setInterval(
          () => this.call("RenewLease", { lease_id: leased.lease_id }).catch(() => undefined),
          (Number(leased.lease.seconds) * 1000 + leased.lease.nanos / 1e6) / RENEWALS,
        );
        try {
          const ended = await this.play(play, leased);
          played += ended; // not in one statement: others count while this one plays
        } finally {
          clearInterval(renewing);
        }
      }
    };
    try {
      // The first one that ends has learned that the run ended, or failed.
      await Promise.race(Array.from({ length: atATime }, work));
    } finally {
      over = true;
    }
    return played;
  }

  private async play(play: (episode: Episode) => Promise<number | undefined>, leased: Wire): Promise<number> {
    let episode: Episode | undefined;
    try {
      episode = new Episode(this, leased, await this.call("OpenEpisode", { lease_id: leased.lease_id, request_id: randomUUID() }));
      const reward = await play(episode);
      if (!episode.ended) await episode.submit(reward);
    } catch (error) {
      if (!this.closed) console.warn(`an episode of task ${leased.task.task_id} is given up:`, error);
      await episode?.abandon(String(error)).catch(() => undefined);
      return 0;
    }
    return 1;
  }

  private async lease(): Promise<Wire | undefined> {
    // A lease whose answer was lost is given again: the same request_id.
    const request = { run: `runs/${this.runName}`, request_id: randomUUID(), max_tasks: 1, max_episodes: 1, wait: { seconds: WAIT_S } };
    for (;;) {
      try {
        return (await this.call("LeaseTasks", request, { answerMs: ANSWER_MS })).tasks[0];
      } catch (error) {
        if (!(error instanceof SluiceError)) throw error;
        if (error.reason === "RUN_ENDED") return undefined;
        if (error.code !== grpc.status.RESOURCE_EXHAUSTED) throw error;
      }
    }
  }

  /**
   * Makes an idempotent call, again and again while no gateway answers or the gateway asks to wait. No attempt begins after `timeoutMs`;
   * each may take what is left of it, and `answerMs` at least. `key` is that of the episode which the call settles.
   */
  async call(method: string, request: object, { timeoutMs = PATIENCE_MS, answerMs = 100, key = "" } = {}): Promise<Wire> {
    const metadata = this.metadata.clone();
    if (key) metadata.set("session-key", key);
    const until = Date.now() + timeoutMs;
    let unreached: SluiceError | undefined;
    for (let pauseMs = 100; ; pauseMs = Math.min(2 * pauseMs, 2000)) {
      try {
        return await new Promise((resolve, reject) => {
          const done = (error: grpc.ServiceError | null, answer: Wire) => (error ? reject(error) : resolve(answer));
          this.client[method](request, metadata, { deadline: Math.max(until, Date.now() + answerMs) }, done);
        });
      } catch (failed) {
        if (!(failed instanceof Error && "metadata" in failed)) throw failed; // the request does not fit the contract
        const error = understood(failed as grpc.ServiceError, timeoutMs);
        if (error.code === grpc.status.UNAVAILABLE) unreached = error;
        else if (error.code === grpc.status.DEADLINE_EXCEEDED) throw unreached ?? error;
        else if (error.code !== grpc.status.RESOURCE_EXHAUSTED || !error.retryAfterMs) throw error;
        const waitMs = Math.max(pauseMs, error.retryAfterMs);
        if (this.closed || Date.now() + waitMs >= until) throw error;
        await sleep(waitMs);
      }
    }
  }
}

/** Reads google.rpc.Status from the trailing metadata: ErrorInfo.reason and RetryInfo.retry_delay. */
function understood(error: grpc.ServiceError, timeoutMs: number): SluiceError {
  let [reason, retryAfterMs] = [grpc.status[error.code] ?? "UNKNOWN", 0];
  const [raw] = error.metadata.get("grpc-status-details-bin");
  for (const any of raw instanceof Buffer ? fields(raw).filter(([number]) => number === 3) : []) {
    const detail = new Map(fields(any[1] as Buffer));
    const [type, value] = [String(detail.get(1)), fields((detail.get(2) as Buffer | undefined) ?? Buffer.alloc(0))];
    if (type.endsWith("ErrorInfo")) reason = String(new Map(value).get(1));
    if (type.endsWith("RetryInfo")) {
      const delay = new Map(fields(new Map(value).get(1) as Buffer));
      retryAfterMs = Number(delay.get(1) ?? 0) * 1000 + Number(delay.get(2) ?? 0) / 1e6;
    }
  }
  const lost = reason === "UNAVAILABLE"; // not a word of a gateway
  const check = "check that the run is alive, and that the address is the gRPC one of its gateway (gateway.server.port, not http_port)";
  const message = lost ? `no gateway answered for ${timeoutMs / 1000} s (${error.details}): ${check}` : error.details;
  return new SluiceError(error.code, reason, message, retryAfterMs);
}

/** Splits a protobuf message into its fields: varints as numbers, everything with a length as bytes. */
function fields(bytes: Buffer): [number, number | Buffer][] {
  const found: [number, number | Buffer][] = [];
  let at = 0;
  const varint = (): number => {
    for (let [value, scale] = [0, 1]; ; scale *= 128) {
      const byte = bytes[at++] ?? 0;
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const tag = varint();
    if (tag % 8 === 0) found.push([Math.floor(tag / 8), varint()]);
    else if (tag % 8 === 2) {
      const length = varint();
      found.push([Math.floor(tag / 8), bytes.subarray(at, (at += length))]);
    } else break;
  }
  return found;
}
