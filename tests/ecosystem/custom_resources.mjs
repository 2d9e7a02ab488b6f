// Checks manifests of custom resources, a JSON array on stdin, against what their projects publish: custom_resources.mjs NODE_PROJECT
// Prints what is wrong, a line each. An unknown kind is wrong, and so is an unknown field.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const PACKAGES = {
  "monitoring.coreos.com": "@kubernetes-models/prometheus-operator",
  "keda.sh": "@kubernetes-models/keda",
  "cert-manager.io": "@kubernetes-models/cert-manager",
};

// The validators of these packages skip fields that they do not know. A field that a validator never reads, of an object in which it
// reads others, is such a field.
function watched(value, path, unread) {
  if (value === null || typeof value !== "object") return value;
  const children = new Map(Object.entries(value).map(([key, each]) => [key, watched(each, `${path}/${key}`, unread)]));
  const read = new Set();
  let looked = false;
  unread.push(() => {
    const keys = looked && !Array.isArray(value) ? [...children.keys()].filter((key) => !read.has(key)) : [];
    return keys.map((key) => `unknown field ${path}/${key}`);
  });
  return new Proxy(value, {
    get(target, key) {
      looked = true;
      read.add(key);
      return children.has(key) ? children.get(key) : Reflect.get(target, key);
    },
    ownKeys(target) {
      // All of its keys are asked for: a map.
      for (const key of children.keys()) read.add(key);
      return Reflect.ownKeys(target);
    },
  });
}

let wrong = 0;
for (const manifest of JSON.parse(readFileSync(0, "utf8"))) {
  const [group, version] = manifest.apiVersion.split("/");
  const say = (problem) => {
    wrong += 1;
    console.log(`${manifest.kind} ${manifest.metadata.name}: ${problem}`);
  };
  const library = PACKAGES[group];
  if (library === undefined) {
    say(`no schema is known for ${manifest.apiVersion}`);
    continue;
  }
  const models = await import(pathToFileURL(`${process.argv[2]}/node_modules/${library}/${group}/${version}/index.js`));
  const Kind = models[manifest.kind];
  if (Kind === undefined) {
    say(`${library} has no ${manifest.kind}`);
    continue;
  }
  const unread = [];
  const model = new Kind(manifest);
  for (const key of Object.keys(model)) model[key] = watched(model[key], `/${key}`, unread);
  try {
    model.validate();
    unread.flatMap((each) => each()).forEach(say);
  } catch (error) {
    say(error.message);
  }
}
process.exit(wrong ? 1 : 0);
