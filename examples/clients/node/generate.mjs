// Samples from a running policy over gRPC. Usage: node generate.mjs [HOST:PORT] [PROMPT]
// The contract is read from proto/ at run time: nothing is generated, nothing of Sluice's Python is needed.
import { readFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const [target = "127.0.0.1:7103", prompt = "Reverse: abcdef"] = process.argv.slice(2);
const protos = fileURLToPath(new URL("../../../proto", import.meta.url));
const { sluice } = grpc.loadPackageDefinition(
  loadSync("sluice/v1/rollout.proto", { keepCase: true, includeDirs: [protos], longs: Number, enums: String, defaults: true }),
);

// With SLUICE_TOKEN_FILE set, calls carry the bearer token of the role `agent`.
const metadata = new grpc.Metadata();
if (process.env.SLUICE_TOKEN_FILE) {
  const token = (await readFile(process.env.SLUICE_TOKEN_FILE, "utf8")).trim();
  metadata.set("authorization", `Bearer ${token}`);
}

const client = new sluice.v1.RolloutService(target, grpc.credentials.createInsecure());
const request = {
  conversation: { messages: [{ role: "user", content: prompt }] },
  sampling: { max_tokens: 32, temperature: 1.0 },
  n: 4,
  return_text: true,
};

client.Generate(request, metadata, { deadline: Date.now() + 30_000 }, (error, response) => {
  if (error) {
    console.error(`${grpc.status[error.code]}: ${error.details}`);
    process.exitCode = 1;
  } else {
    for (const sample of response.samples) {
      const versions = sample.version_spans.map(
        ({ start, policy_version: v }) => `${v.epoch}.${v.number} from token ${start}`,
      );
      const logprob = sample.logprobs.reduce((sum, each) => sum + each, 0);
      console.log(
        `${JSON.stringify(sample.text)}  ${sample.token_ids.length} tokens, log p ${logprob.toFixed(2)}, ` +
          `version ${versions.join(", ")}, ${sample.finish_reason}`,
      );
    }
  }
  client.close();
});
