// Plays a guessing game with the policy of a run: npm start [HOST:PORT] [RUN]
// It tells the policy "higher" or "lower", and rewards it the more, the sooner it finds the number.
import { Agent, type Episode, type Message } from "../clients/typescript/dist/sluice.js";

const GUESSES = 6;

async function play(episode: Episode): Promise<number> {
  const { low, high, secret } = episode.data as { low: number; high: number; secret: number };
  const messages: Message[] = [{ role: "user", content: `${low}-${high}` }];
  for (let turn = 0; turn < GUESSES; turn++) {
    const { message } = await episode.generate(messages);
    const guess = /^\d+$/.test(message.content ?? "") ? Number(message.content) : undefined;
    if (guess === undefined || guess === secret) return guess === undefined ? 0 : 1 - turn / GUESSES;
    messages.push(message, { role: "user", content: guess < secret ? "higher" : "lower" });
  }
  return 0;
}

const { SLUICE_GATEWAY = "127.0.0.1:7105", SLUICE_RUN = "number_guess" } = process.env; // an evaluation sets both
const [target = SLUICE_GATEWAY, run = SLUICE_RUN] = process.argv.slice(2);
const agent = new Agent(target, run, { tokenFile: process.env.SLUICE_TOKEN_FILE });
const began = Date.now();
const rewards: number[] = [];
const played = await agent.run(
  async (episode) => {
    const reward = await play(episode);
    rewards.push(reward);
    if (rewards.length % 500 === 0) {
      const mean = rewards.slice(-500).reduce((sum, each) => sum + each, 0) / 500;
      console.log(`${rewards.length} games, mean reward of the last 500: ${mean.toFixed(3)}, ${Math.round((Date.now() - began) / 1000)} s`);
    }
    return reward;
  },
  { atATime: 64 },
);
console.log(`${played} games were played`);
agent.close();
process.exit(0); // what was under way when the run ended is left
