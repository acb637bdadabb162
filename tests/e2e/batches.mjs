// OpenAI's client for Node against the files and batches of a service: node batches.mjs URL
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const endpoint = "/v1/chat/completions";

function row(id, content, more = {}) {
  const body = { model: "demo", messages: [{ role: "user", content }], temperature: 0 };
  return { custom_id: id, method: "POST", url: endpoint, body: { ...body, ...more } };
}

async function upload(...rows) {
  const text = rows.map((line) => (typeof line === "string" ? line : JSON.stringify(line))).join("\n");
  return client.files.create({ file: await toFile(Buffer.from(text), "in.jsonl"), purpose: "batch" });
}

async function ended(id) {
  for (let tries = 0; tries < 300; tries++) {
    const batch = await client.batches.retrieve(id);
    if (["completed", "failed", "expired", "cancelled"].includes(batch.status)) return batch;
    await new Promise((resolve) => setTimeout(resolve, 200));
  }
  throw new Error(`${id} does not end`);
}

async function lines(id) {
  const text = await (await client.files.content(id)).text();
  return text.trimEnd().split("\n").map((line) => JSON.parse(line));
}

const file = await upload(row("a", "What is 47+28?"), row("b", "What is 12-40?"), row("c", "", { n: -1 }));
assert.equal(file.purpose, "batch");
assert.equal((await client.files.retrieve(file.id)).id, file.id);
let batch = await client.batches.create({
  input_file_id: file.id, endpoint, completion_window: "24h", metadata: { night: "1" },
});
assert.equal(batch.status, "validating");
batch = await ended(batch.id);
assert.equal(batch.status, "completed");
assert.deepEqual(batch.request_counts, { total: 3, completed: 2, failed: 1 });
assert.deepEqual(batch.metadata, { night: "1" });
const answers = Object.fromEntries(
  (await lines(batch.output_file_id)).map((line) => [line.custom_id, line.response.body.choices[0].message.content]),
);
assert.deepEqual(answers, { a: "75", b: "-28" });
const [failed] = await lines(batch.error_file_id);
assert.equal(failed.custom_id, "c");
assert.equal(failed.response.status_code, 400);

const broken = await client.batches.create({
  input_file_id: (await upload(row("a", "x"), "{")).id, endpoint, completion_window: "24h",
});
const refused = await ended(broken.id);
assert.equal(refused.status, "failed");
assert.equal(refused.errors.data[0].line, 2);

const page = await client.batches.list({ limit: 1 });
assert.equal(page.data[0].id, broken.id);
assert.ok(page.hasNextPage());
assert.equal((await page.getNextPage()).data[0].id, batch.id);

await assert.rejects(client.batches.cancel(batch.id), OpenAI.ConflictError);
assert.equal((await client.files.delete(file.id)).deleted, true);
await assert.rejects(client.files.retrieve(file.id), OpenAI.NotFoundError);
console.log("all is as it should be");
