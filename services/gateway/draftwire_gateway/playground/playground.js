/** The page: reads the form, runs a completion, then a plain one, and shows both. */

import { ApiError, fetchModels, streamCompletion } from "./api.js";
import { drawChart } from "./chart.js";
import { clearComparison, compare } from "./comparison.js";
import { Conversation } from "./conversation.js";
import { oncePerFrame } from "./frames.js";
import { inspect } from "./inspector.js";
import { element, format, input } from "./page.js";
import { asCurl, asPython, pathOf } from "./snippets.js";
import { drawStrip } from "./strip.js";
import { SOURCES, Tally } from "./tally.js";
import { followTheme } from "./theme.js";
import { TokenText } from "./tokens.js";

/**
 * @typedef {import("./comparison.js").Outcome} Outcome
 * @typedef {Record<string, unknown>} Body
 * @typedef {{prompt: string, isChat: boolean, body: Body}} CompletionRequest
 */

/** What the address of a page ends with that begins as a conversation. */
const CHAT_HASH = "#chat";
/** What its form begins with. */
const CHAT_FORM = {
  prompt: "Write a Python function that returns the largest number of a list, with an example.",
  temperature: "0.2",
  top_p: "0.9",
};
const speculative = new TokenText(element("speculative"), inspect);
const plain = new TokenText(element("plain"), inspect);
const conversation = new Conversation();
/** Of the speculative run. */
let tally = new Tally();
/** The name of the target, if known. @type {string | undefined} */
let target;
/** Cancels the current run. @type {AbortController | null} */
let running = null;

/** Shows the statistics of the speculative run. */
function drawFigures() {
  element("block_efficiency").textContent = format(tally.blockEfficiency, 2);
  element("acceptance_rate").textContent = format(tally.acceptanceRate, 3);
  element("tokens_per_second").textContent = format(tally.tokensPerSecond, 1);
  element("first_token").textContent = format(tally.firstTokenMs, 0);
  element("tokens").textContent = String(tally.numTokens);
  element("rounds").textContent = String(tally.numRounds);
  element("lengths").textContent = tally.lengths;
  element("ahead_figure").hidden = tally.ahead === "";
  element("ahead").textContent = tally.ahead;
  element("ahead_wasted_figure").hidden = tally.ahead === "";
  element("ahead_wasted").textContent = tally.wasted;
  for (const count of document.querySelectorAll("[data-count]")) {
    count.textContent = String(tally.bySource[count.getAttribute("data-count") ?? ""]);
  }
  drawChart(tally);
  drawStrip(tally);
}

const showFigures = oncePerFrame(drawFigures);

/** What the form asks for, as a program would. @returns {CompletionRequest} */
function readForm() {
  const prompt = input("prompt").value;
  const isChat = input("chat").checked;
  const [seed, length, stop] = ["seed", "num_speculative_tokens", "stop_text"].map((id) => input(id).value);
  const body = {
    ...(target === undefined ? {} : { model: target }),
    ...(isChat ? { messages: conversation.asking(prompt) } : { prompt }),
    max_tokens: Number(input("max_tokens").value),
    temperature: Number(input("temperature").value),
    top_p: Number(input("top_p").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
    ...(stop === "" ? {} : { stop: [stop.replaceAll("\\n", "\n")] }),
    ...(length === "" ? {} : { num_speculative_tokens: Number(length) }),
    rejection_sample_method: input("rejection_sample_method").value,
  };
  return { prompt, isChat, body };
}

/**
 * A seed where the user gave none: under `coupled` alone, where the plain run must have the same text, and lengths are
 * chosen all the same. Elsewhere the gateway draws one, since a seed that is sent may have been used before.
 *
 * @param {Record<string, unknown>} body
 * @returns {{ seed?: number }}
 */
function seedOf(body) {
  const isDrawn = !("seed" in body) && body.rejection_sample_method === "coupled";
  input("seed").placeholder = isDrawn ? String(crypto.getRandomValues(new Uint32Array(1))[0]) : "random";
  return isDrawn ? { seed: Number(input("seed").placeholder) } : {};
}

/**
 * Adds what the page needs to show the run.
 *
 * @param {CompletionRequest} request
 * @returns {CompletionRequest}
 */
function detailed({ prompt, isChat, body }) {
  const details = {
    ...seedOf(body),
    ...(isChat ? { logprobs: true, top_logprobs: 0 } : { logprobs: 0 }),
    logprobs_mode: "processed",
    token_details: true,
    cache_salt: crypto.getRandomValues(new Uint32Array(2)).join("-"),
  };
  return { prompt, isChat, body: { ...body, ...details } };
}

/**
 * Copies the request of the form.
 *
 * @param {(snippet: import("./snippets.js").Snippet) => string} write
 */
async function copy(write) {
  if (!(/** @type {HTMLFormElement} */ (element("form")).reportValidity())) return;
  const { isChat, body } = readForm();
  const needsToken = !element("token_field").hidden;
  await copyText(() => write({ origin: location.origin, isChat, body, needsToken }));
}

/** @param {() => string} write */
async function copyText(write) {
  try {
    await navigator.clipboard.writeText(write());
    say("Copied.");
  } catch {
    complain(new ApiError("The browser does not let this page copy."));
  }
}

/** Runs the request of the form, and shows the outcome. */
async function run() {
  if (running || !(/** @type {HTMLFormElement} */ (element("form")).reportValidity())) return;
  const request = detailed(readForm());
  running = new AbortController();
  setState("running");
  if (request.isChat) conversation.show();
  try {
    await runBoth(request, running.signal);
    setState("done");
  } catch (error) {
    fail(error);
  } finally {
    running = null;
    showConversation();
  }
}

/** @param {CompletionRequest} request Was answered, or stopped after a part of the answer. */
function keepAnswer(request) {
  if (!request.isChat || tally.text === "") return;
  conversation.add(request.prompt, tally.text);
  input("prompt").value = "";
  input("prompt").placeholder = "Go on.";
}

/** Shows the buttons of the conversation. */
function showConversation() {
  element("conversation_actions").hidden = !input("chat").checked;
  for (const id of ["copy_answer", "new_conversation"]) input(id).disabled = conversation.answer === "" || running !== null;
}

/** Begins a conversation anew. */
function beginAnew() {
  conversation.clear();
  input("prompt").placeholder = "";
  input("prompt").focus();
  showConversation();
}

/**
 * @param {CompletionRequest} request
 * @param {AbortSignal} signal
 */
async function runBoth(request, signal) {
  clearComparison();
  plain.begin("");
  tally = new Tally();
  say("Running.");
  /** @type {Outcome} */
  let first;
  try {
    first = await complete(request, speculative, tally, signal);
  } finally {
    keepAnswer(request);
  }
  say(summary(first.tally));
  const { body } = request;
  if (!input("compare").checked || body.num_speculative_tokens === 0) return;
  say(`${summary(first.tally)} Now the same prompt, plainly.`);
  // Another salt prevents a prefix cache hit, so that the plain run has a prefill of its own.
  const again = { ...request, body: { ...body, num_speculative_tokens: 0, cache_salt: `${body.cache_salt}-plain` } };
  const second = await complete(again, plain, new Tally(), signal);
  const mustBeEqual = body.temperature === 0 || body.rejection_sample_method === "coupled";
  compare(first, second, mustBeEqual);
  say(`${summary(first.tally)} Plain decoding: ${format(second.tally.tokensPerSecond, 1)} tokens/s.`);
}

/**
 * Runs one completion and shows it.
 *
 * @param {CompletionRequest} request
 * @param {TokenText} text
 * @param {Tally} counts
 * @param {AbortSignal} signal
 * @returns {Promise<Outcome>}
 */
async function complete(request, text, counts, signal) {
  text.begin(request.isChat ? `${request.prompt}\n\n` : request.prompt);
  try {
    const path = pathOf(request.isChat);
    for await (const chunk of streamCompletion(path, request.body, input("token").value.trim(), signal)) {
      const choice = chunk.choices[0];
      const added = choice?.text ?? choice?.delta?.content ?? "";
      if (added || choice?.draftwire?.tokens?.length) {
        const { num_draft_tokens = 0, num_draft_positions = 0, tokens = [] } = choice.draftwire ?? {};
        const round = {
          numDraftTokens: num_draft_tokens,
          numDraftPositions: num_draft_positions,
          tokens,
          text: added,
        };
        counts.add(round);
        text.add(round);
      }
      if (chunk.metrics) counts.settle(chunk.metrics.speculative_decoding);
      showFigures();
    }
  } finally {
    await text.drained();
    drawFigures();
  }
  return { tally: counts, text: counts.text };
}

/** @param {unknown} error */
function fail(error) {
  if (error instanceof DOMException && error.name === "AbortError") {
    setState("stopped");
    return say(`Stopped after ${tally.numTokens} tokens.`);
  }
  setState("failed");
  say(tally.numTokens === 0 ? "Nothing came." : `Ended after ${tally.numTokens} tokens.`);
  complain(error instanceof ApiError ? error : new ApiError(`The page failed: ${error}`));
}

/** @param {ApiError} error */
function complain(error) {
  element("error").textContent = error.message;
  element("error").hidden = false;
  if (error.status !== 401) return;
  element("token_field").hidden = false;
  input("token").focus();
}

/** @param {string} text */
function say(text) {
  element("status").textContent = text;
}

/**
 * @param {Tally} counts
 * @returns {string}
 */
function summary(counts) {
  const { metrics, numTokens } = counts;
  const law = metrics?.is_lossy ? `, rule ${metrics.rejection_sample_method}, which changes the target's probabilities` : "";
  return `${numTokens} tokens in ${format(counts.durationMs / 1000, 2)} s${law}.`;
}

/** @param {"running" | "done" | "stopped" | "failed"} state */
function setState(state) {
  const isRunning = state === "running";
  document.body.dataset.state = state;
  input("run").disabled = isRunning;
  input("stop").disabled = !isRunning;
  if (isRunning) element("error").hidden = true;
}

/** Shows the models of the gateway. */
async function showModels() {
  try {
    const [model] = await fetchModels(input("token").value.trim());
    target = model?.id;
    const most = model?.draftwire?.max_speculative_tokens;
    if (most !== undefined) input("num_speculative_tokens").max = String(most);
    element("target").textContent = target ?? "none";
    element("drafter").textContent = model?.draftwire?.drafters?.join(", ") || "none";
    element("error").hidden = true;
  } catch (error) {
    complain(error instanceof ApiError ? error : new ApiError("The list of models cannot be read."));
  }
  document.body.dataset.models = "told";
}

/** Makes the form one of a conversation. */
function askQuestions() {
  input("chat").checked = true;
  for (const [id, value] of Object.entries(CHAT_FORM)) input(id).value = value;
  showConversation();
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  if (event.key === "Escape") running?.abort();
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  run();
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
element("stop").addEventListener("click", () => running?.abort());
element("chat").addEventListener("change", showConversation);
element("copy_answer").addEventListener("click", () => copyText(() => conversation.answer));
element("new_conversation").addEventListener("click", beginAnew);
element("copy_curl").addEventListener("click", () => copy(asCurl));
element("copy_python").addEventListener("click", () => copy(asPython));
input("token").addEventListener("change", showModels);
document.addEventListener("keydown", onKey);
followTheme(/** @type {HTMLSelectElement} */ (element("theme")));
inspect(null);
if (location.hash === CHAT_HASH) askQuestions();
showModels();
