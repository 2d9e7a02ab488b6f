// Serves a guessing game to a run: npm start [HOST:PORT]
// It tells the policy "higher" or "lower", and rewards it the more, the sooner it finds the number.
import { serve, type Episode, type Task } from "../clients/typescript/dist/environment.js";

const [WIDTH, LARGEST_LOW, GUESSES] = [16, 83, 6];

/** One game in eight is held out for evaluation. */
function games(split: string): Task[] {
  if (split !== "train" && split !== "eval") throw new Error(`the splits are train and eval, not ${split}`);
  const found: Task[] = [];
  for (let low = 0; low <= LARGEST_LOW; low++) {
    for (let offset = 0; offset < WIDTH; offset++) {
      const heldOut = (low * 5 + offset * 3) % 8 === 0;
      if (heldOut === (split === "eval")) found.push({ id: `${low}+${offset}`, data: { low, high: low + WIDTH - 1, secret: low + offset } });
    }
  }
  return found;
}

/** The same seed gives the same order. */
function shuffled<Item>(items: Item[], seed: number): Item[] {
  let state = (seed % 2147483646) + 1;
  return items
    .map((item) => ({ item, place: (state = (state * 48271) % 2147483647) }))
    .sort((one, other) => one.place - other.place)
    .map(({ item }) => item);
}

function game({ low, high, secret }: { low: number; high: number; secret: number }): Episode {
  let turn = 0;
  return {
    messages: [{ role: "user", content: `${low}-${high}` }],
    step({ content = "" }) {
      const guess = /^\d+$/.test(content) ? Number(content) : undefined;
      if (guess === undefined) return { reward: 0, done: true };
      if (guess === secret) return { reward: 1 - turn / GUESSES, done: true };
      if (++turn === GUESSES) return { reward: 0, done: true };
      return { messages: [{ role: "user", content: guess < secret ? "higher" : "lower" }] };
    },
  };
}

const [address = "127.0.0.1:7106"] = process.argv.slice(2);
const stop = await serve(
  {
    name: "guess",
    tasks: (split, seed) => (split === "train" ? shuffled(games(split), seed) : games(split)),
    reset: (task) => game(task.data as { low: number; high: number; secret: number }),
  },
  address,
);
console.log(`the environment listens at ${address}`);
process.once("SIGTERM", () => void stop().then(() => process.exit(0)));
