// OpenAI's client for node and the AI SDK, unchanged. The packages come from the working folder.
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'
import assert from 'node:assert/strict'

const found = createRequire(pathToFileURL(process.cwd() + '/').href)
const load = name => import(pathToFileURL(found.resolve(name)).href)
const { default: OpenAI } = await load('openai')
const { generateText, streamText, Output } = await load('ai')
const { createOpenAI } = await load('@ai-sdk/openai')
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible')
const { z } = await load('zod')

const { BATCHLAB_URL, BATCHLAB_SERVED: model } = process.env
const base = { baseURL: `${BATCHLAB_URL}/v1`, apiKey: 'any' }
const client = new OpenAI({ ...base, maxRetries: 0 })
const talk = [{ role: 'user', content: 'Name three colours.' }]
const short = { model, messages: talk, max_completion_tokens: 12, temperature: 0 }
const ask = { model, input: 'Name three colours.', max_output_tokens: 12, temperature: 0 }
const schema = {
  type: 'object', required: ['red'], additionalProperties: false,
  properties: { red: { type: 'integer', minimum: 0, maximum: 255 } },
}

const checks = {
  async chat() {
    const whole = await client.chat.completions.create(short)
    let text = ''
    for await (const part of await client.chat.completions.create({ ...short, stream: true }))
      text += part.choices[0]?.delta?.content ?? ''
    assert.equal(whole.usage.completion_tokens, 12)
    assert.equal(text, whole.choices[0].message.content)
  },
  async responses() {
    const whole = await client.responses.create(ask)
    let text = '', last
    for await (const event of await client.responses.create({ ...ask, stream: true })) {
      if (event.type === 'response.output_text.delta') text += event.delta
      last = event
    }
    assert.equal(text, whole.output_text)
    assert.equal(last.type, 'response.incomplete')
    assert.deepEqual(last.response.usage.output_tokens, whole.usage.output_tokens)
    const counted = await client.responses.inputTokens.count({ model, input: ask.input })
    assert.equal(counted.input_tokens, whole.usage.input_tokens)
    const next = await client.responses.create({ ...ask, input: 'And more?', previous_response_id: whole.id })
    assert.ok(next.usage.input_tokens > whole.usage.input_tokens)
  },
  async structured() {
    const format = { type: 'json_schema', name: 'colour', strict: true, schema }
    const chat = await client.chat.completions.create({
      ...short, max_completion_tokens: 100, response_format: { type: 'json_schema', json_schema: format },
    })
    const response = await client.responses.create({ ...ask, max_output_tokens: 100, text: { format } })
    for (const text of [chat.choices[0].message.content, response.output_text])
      assert.ok(Number.isInteger(JSON.parse(text).red))
  },
  async background() {
    let r = await client.responses.create({ ...ask, background: true })
    assert.equal(r.status, 'queued')
    while (['queued', 'in_progress'].includes(r.status)) {
      await new Promise(done => setTimeout(done, 200))
      r = await client.responses.retrieve(r.id)
    }
    assert.equal(r.output_text, (await client.responses.create(ask)).output_text)
  },
}
for (const [name, provider] of Object.entries({
  compatible: createOpenAICompatible({ ...base, name: 'batchlab', supportsStructuredOutputs: true, includeUsage: true })(model),
  sdk_chat: createOpenAI(base).chat(model),
  sdk_responses: createOpenAI(base)(model),
})) {
  checks[name] = async () => {
    const own = { model: provider, prompt: 'Name three colours.', maxOutputTokens: 12, temperature: 0, maxRetries: 0 }
    const whole = await generateText(own)
    const stream = streamText(own)
    let text = ''
    for await (const part of stream.textStream) text += part
    assert.equal(text, whole.text)
    assert.ok(whole.text)
    assert.equal((await stream.usage).outputTokens, 12)
    assert.equal(whole.usage.outputTokens, 12)
    const output = Output.object({ schema: z.object({ red: z.number().int().min(0).max(255) }) })
    const made = await generateText({ ...own, maxOutputTokens: 100, output })
    assert.ok(Number.isInteger(made.output.red))
  }
}

const results = {}
for (const [name, check] of Object.entries(checks)) {
  try {
    await check()
    results[name] = 'ok'
  } catch (e) {
    results[name] = `${e.stack ?? e}`.slice(0, 1500)
  }
}
console.log(JSON.stringify(results))
