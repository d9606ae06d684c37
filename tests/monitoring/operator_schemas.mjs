// Prints what the Prometheus operator's schemas have against the objects on standard input, as JSON.
// usage: node operator_schemas.mjs FOLDER    the folder of @kubernetes-models/prometheus-operator
//
// The package holds its schemas as compiled validators, which pass over fields that they do not know. A validator
// looks at each field that it knows, so a field that was never looked at is an unknown one.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const SCHEMA = "_schemas/ComGithubPrometheusOperatorPrometheusOperatorPkgApisMonitoringV1";

function watched(value, path, unseen) {
  if (value === null || typeof value !== "object") return value;
  const inner = {};
  for (const key of Object.keys(value)) {
    inner[key] = watched(value[key], `${path}/${key}`, unseen);
    unseen.add(`${path}/${key}`);
  }
  return new Proxy(value, {
    get(target, key) {
      unseen.delete(`${path}/${String(key)}`);
      return Object.hasOwn(inner, key) ? inner[key] : Reflect.get(target, key);
    },
  });
}

const problems = [];
for (const object of JSON.parse(readFileSync(0, "utf8"))) {
  const { validate } = await import(pathToFileURL(`${process.argv[2]}/${SCHEMA}${object.kind}.js`));
  const unseen = new Set();
  validate(watched(object, "", unseen));
  for (const { instancePath, message, keyword, params } of validate.errors ?? []) {
    problems.push(`${object.kind}${instancePath}: ${message ?? `${keyword} ${JSON.stringify(params)}`}`);
  }
  for (const path of unseen) problems.push(`${object.kind}${path}: unknown field`);
}
console.log(JSON.stringify(problems));
