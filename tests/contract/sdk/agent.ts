// Plays episodes of a run with the stubs of sluice-proto alone: node agent.js EPISODES BASE_URL. Prints what it saw as JSON.
import { randomUUID } from "node:crypto";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { ErrorInfoSchema, RetryInfoSchema } from "sluice-proto/google/rpc/error_details_pb";
import { EpisodeService, type EpisodeServiceGenerateResponse } from "sluice-proto/sluice/v1/episode_pb";

const [episodes = "", baseUrl = ""] = process.argv.slice(2);
const client = createClient(EpisodeService, createGrpcTransport({ baseUrl, defaultTimeoutMs: 60_000 }));
const said = (error: ConnectError): string => error.findDetails(ErrorInfoSchema)[0]?.reason ?? "no reason";
const refused = async (call: Promise<unknown>): Promise<ConnectError> =>
  call.then(() => Promise.reject(new Error("the call went through")), (error: unknown) => ConnectError.from(error));

async function streamed(episodeId: string, text: string): Promise<EpisodeServiceGenerateResponse> {
  const prompt = { case: "conversation" as const, value: { messages: [{ role: "user", content: text }] } };
  let result: EpisodeServiceGenerateResponse | undefined; // in the last message; those before it have the text as it comes
  for await (const part of client.generateStream({ request: { episodeId, requestId: randomUUID(), prompt } })) {
    result = part.result ?? result;
  }
  if (!result) throw new Error("the stream ended without a result");
  return result;
}

const seen = { episodes: 0, texts: [] as string[], tokens: 0, unknown: "", code: "", waited: 0 };
while (seen.episodes < Number(episodes)) {
  const requestId = randomUUID();
  try {
    const { tasks } = await client.leaseTasks({ run: "runs/test", requestId, maxTasks: 1, maxEpisodes: 1, wait: { seconds: 10n } });
    const [leased] = tasks;
    if (!leased?.task) throw new Error("a lease without a task");
    const { episodeId, settlingKey } = await client.openEpisode({ leaseId: leased.leaseId, requestId: randomUUID() });
    const text = String(leased.task.data?.["text"]);
    const { generations } = await streamed(episodeId, text);
    const [made] = generations;
    if (!made?.message || !made.sample) throw new Error("a stream without a sample");
    seen.texts.push(made.message.content);
    seen.tokens += made.sample.tokenIds.length;
    const messages = [{ role: "user", content: text }, made.message, { role: "user", content: "again" }];
    const answer = await client.generate({ episodeId, requestId: randomUUID(), prompt: { case: "conversation", value: { messages } } });
    if (answer.parent !== made.generationId) throw new Error("the second turn does not continue the first");
    const second = answer.generations[0]?.generationId ?? "";
    const settling = { headers: { "session-key": settlingKey } };
    await client.recordReward({ episodeId, reward: 0.5, target: { case: "generationId", value: second } }, settling);
    const { trajectoryIds } = await client.submitTrajectory({ episodeId, reward: made.message.content === text ? 1 : 0 }, settling);
    seen.episodes += trajectoryIds.length;
    if (!seen.unknown) {
      const error = await refused(client.submitTrajectory({ episodeId: "never/opened", reward: 1 }));
      [seen.unknown, seen.code] = [said(error), Code[error.code] ?? ""];
    }
  } catch (caught) {
    const error = ConnectError.from(caught);
    const busy = error.code === Code.ResourceExhausted || error.code === Code.Unavailable;
    if (!busy) throw error;
    const retry = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
    seen.waited++;
    await new Promise((resolve) => setTimeout(resolve, Number(retry?.seconds ?? 0n) * 1000 + (retry?.nanos ?? 0) / 1e6 + 50));
  }
}
console.log(JSON.stringify(seen));
