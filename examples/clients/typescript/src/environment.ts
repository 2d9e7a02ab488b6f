// Serves an environment to a training run: tasks, turns and rewards. A run uses it with orchestrator.environment = "grpc://HOST:PORT".
//
//   await serve({
//     name: "guess",
//     tasks: () => [{ id: "seven", data: { secret: 7 } }],
//     reset: (task) => ({
//       messages: [{ role: "user", content: "Guess a number." }],
//       step: ({ content }) => (content === `${task.data.secret}` ? { reward: 1, done: true } : { messages: [{ role: "user", content: "no" }] }),
//     }),
//   });
//
// A call that is repeated is answered as the first one was.
import grpc from "@grpc/grpc-js";
import { load, plain, struct, type Message, type Wire } from "./contract.js";

export type { Message } from "./contract.js";
type Eventually<Value> = Value | Promise<Value>;

export interface Task { id: string; data?: Record<string, unknown>; maxTokens?: number }
/** What follows a turn of the assistant: messages, or the end. A reward that is left out is none. */
export interface Turn { messages?: Message[]; reward?: number; done?: boolean; truncated?: boolean; metrics?: Record<string, number> }
/** `last`: the run takes no further turn, so the answer should have the reward of what there is. */
export interface Episode { messages: Message[]; step(message: Message, last: boolean): Eventually<Turn>; close?(): Eventually<void> }

/** Poses tasks. It has `reset` for episodes of several turns, or `messages` and `score` for one question and its answer, or all three. */
export interface Environment {
  name: string;
  /** Changes whenever rewards or turns would. */
  version?: string;
  /** The same seed gives the same tasks in the same order. */
  tasks(split: string, seed: number): Eventually<Task[]>;
  /** If a server is started again, its episodes are: the same seed and the same steps must give the same turns. */
  reset?(task: Required<Task>, seed: number): Eventually<Episode>;
  messages?(task: Required<Task>): Eventually<Message[]>;
  /** The reward of an answer; undefined if there is none, which is not zero. */
  score?(task: Required<Task>, answer: Message): Eventually<number | undefined>;
}

export interface Options {
  /** Token that calls must bring, as `token_file` in the run's environment_args. */
  token?: string;
  credentials?: grpc.ServerCredentials;
  /** Episodes that are open at a time. */
  mostEpisodes?: number;
  /** An episode without a call for so long is closed. */
  idleMs?: number;
}

const PAGE_TASKS = 1000;
const { EnvironmentService } = load("environment", { longs: String });

class Refused extends Error {
  constructor(readonly code: grpc.status, message: string) {
    super(message);
  }
}

interface Open { episode: Promise<Episode>; answers: Promise<Turn>[]; over: boolean; used: number }

/** Serves until the returned function is called; it resolves when the last call has been answered. */
export async function serve(environment: Environment, address = "127.0.0.1:7106", options: Options = {}): Promise<() => Promise<void>> {
  const { token, credentials = grpc.ServerCredentials.createInsecure(), mostEpisodes = 4096, idleMs = 900_000 } = options;
  const served = new Served(environment, mostEpisodes, idleMs);
  const server = new grpc.Server();
  const answered = (method: (request: Wire) => Promise<Wire>) => (call: Wire, reply: (error: Wire, answer?: Wire) => void) => {
    const allowed = !token || call.metadata.get("authorization")[0] === `Bearer ${token}`;
    const refusal = new Refused(grpc.status.UNAUTHENTICATED, "this environment wants another token: give its file as environment_args.token_file");
    (allowed ? method(call.request) : Promise.reject(refusal)).then(
      (answer) => reply(null, answer),
      (error: unknown) => reply({ code: error instanceof Refused ? error.code : grpc.status.ABORTED, details: String(error instanceof Refused ? error.message : error) }),
    );
  };
  server.addService(EnvironmentService.service, {
    Describe: answered(() => served.describe()),
    ListTasks: answered((request) => served.listTasks(request)),
    Reset: answered((request) => served.reset(request)),
    Step: answered((request) => served.step(request)),
    Score: answered((request) => served.score(request)),
    CloseEpisode: answered((request) => served.close(request.episode_id)),
  });
  await new Promise<void>((resolve, reject) => server.bindAsync(address, credentials, (error) => (error ? reject(error) : resolve())));
  const looking = setInterval(() => served.closeIdle(), idleMs / 4);
  return async () => {
    clearInterval(looking);
    await new Promise<void>((resolve, reject) => server.tryShutdown((error) => (error ? reject(error) : resolve())));
  };
}

class Served {
  private readonly episodes = new Map<string, Open>();

  constructor(private readonly environment: Environment, private readonly mostEpisodes: number, private readonly idleMs: number) {}

  async describe(): Promise<Wire> {
    const { name, version = "1", reset, messages, score } = this.environment;
    return { environment: name, version, multi_turn: Boolean(reset), max_episodes: this.mostEpisodes, features: messages && score ? ["score"] : [] };
  }

  async listTasks({ split, seed, page_size, page_token }: Wire): Promise<Wire> {
    const tasks = await this.environment.tasks(split, number(seed));
    const start = Number(page_token || 0);
    const end = start + Math.min(page_size || PAGE_TASKS, PAGE_TASKS);
    const page = tasks.slice(start, end).map((each) => ({ task_id: each.id, data: struct(each.data ?? {}), max_tokens: each.maxTokens }));
    return { tasks: page, next_page_token: end < tasks.length ? String(end) : "" };
  }

  async reset({ episode_id, task, seed }: Wire): Promise<Wire> {
    const { reset, messages } = this.environment;
    if (!reset) return { messages: (await messages?.(taskOf(task))) ?? [] };
    if (!this.episodes.has(episode_id)) {
      if (this.episodes.size >= this.mostEpisodes) throw new Refused(grpc.status.RESOURCE_EXHAUSTED, `${this.mostEpisodes} episodes are open: close some, or try again later`);
      const episode = Promise.resolve(reset.call(this.environment, taskOf(task), number(seed)));
      this.episodes.set(episode_id, { episode, answers: [], over: false, used: Date.now() });
      episode.catch(() => this.episodes.delete(episode_id));
    }
    return { messages: (await this.episodes.get(episode_id)!.episode).messages };
  }

  async step({ episode_id, turn, message, last }: Wire): Promise<Wire> {
    const open = this.episodes.get(episode_id);
    if (!open) throw new Refused(grpc.status.NOT_FOUND, `no episode ${episode_id} is open: Reset opens it`);
    open.used = Date.now();
    if (turn > open.answers.length || (turn === open.answers.length && open.over)) {
      throw new Refused(grpc.status.FAILED_PRECONDITION, `this is turn ${turn}, and ${open.over ? "the episode has ended" : `turn ${open.answers.length} is due`}`);
    }
    if (turn === open.answers.length) {
      open.answers.push(open.episode.then((episode) => episode.step(message, Boolean(last))));
      open.over = Boolean((await open.answers[turn])?.done);
    }
    return open.answers[turn];
  }

  async score({ task, conversations }: Wire): Promise<Wire> {
    const { score } = this.environment;
    if (!score) throw new Refused(grpc.status.FAILED_PRECONDITION, "this environment scores in Step: call Reset, then Step");
    const reward = async ({ messages }: Wire): Promise<Wire> => {
      try {
        return { reward: await score.call(this.environment, taskOf(task), messages.at(-1)) };
      } catch (error) {
        console.warn(`an answer to task ${task.task_id} has no reward:`, error);
        return {};
      }
    };
    return { scores: await Promise.all(conversations.map(reward)) };
  }

  async close(name: string): Promise<Wire> {
    const open = this.episodes.get(name);
    this.episodes.delete(name);
    await open?.episode.then((episode) => episode.close?.()).catch((error: unknown) => console.warn(`episode ${name} could not be closed:`, error));
    return {};
  }

  closeIdle(): void {
    for (const [name, { used }] of this.episodes) if (used < Date.now() - this.idleMs) void this.close(name);
  }
}

function taskOf(task: Wire): Required<Task> {
  return { id: task.task_id, data: plain(task.data), maxTokens: task.max_tokens };
}

/** A seed of 64 bits as a number: its lower 53 bits. */
function number(seed: string): number {
  return Number(BigInt.asUintN(53, BigInt(seed)));
}
