/** Client of the gateway's HTTP API, for the parts that the page uses. */

import { readEvents } from "./sse.js";

/**
 * @typedef {object} Token
 * @property {number} id
 * @property {string} text The part of the text that the token made final; may be empty.
 * @property {"accepted" | "recovered" | "bonus" | "plain"} source
 * @property {number | null} [logprob] Log-probability (natural) in the distribution that the target draws from.
 * @property {number | null} [draft_logprob] The same for the drafter; null without a draft token.
 *
 * @typedef {object} Choice
 * @property {string} [text] Of a completion.
 * @property {{content?: string | null}} [delta] Of an answer in a conversation.
 * @property {{num_draft_tokens: number, num_draft_positions: number, tokens?: Token[]}} [draftwire] Details of the chunk, which is one round.
 *
 * @typedef {object} Metrics
 * @property {number} num_rounds
 * @property {number} num_draft_positions
 * @property {number} num_accepted_draft_tokens
 * @property {number[]} num_accepted_tokens_per_pos
 * @property {number[]} draft_length_histogram
 * @property {number} block_efficiency
 * @property {string} rejection_sample_method
 * @property {boolean} is_lossy
 * @property {number} time_to_first_token_ms
 * @property {number} duration_ms
 * @property {number} num_ahead_hits Rounds whose block was there when they began.
 * @property {number} num_ahead_late Rounds whose block was drafted before, and came after they began.
 * @property {number} num_ahead_misses Rounds for which a drafter that goes ahead had drafted no block.
 * @property {number} num_ahead_wasted_tokens Draft tokens of such blocks for texts that did not come true.
 * @property {number} max_held_bytes Largest size of the blocks that the verifier held.
 *
 * @typedef {object} Chunk
 * @property {Choice[]} choices
 * @property {{completion_tokens: number} | null} [usage] In the last chunk.
 * @property {{speculative_decoding: Metrics} | null} [metrics] In the last chunk.
 *
 * @typedef {{id: string, draftwire?: {drafters?: string[], max_speculative_tokens?: number}}} Model
 */

/** An error with a message for users. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {number} [status] HTTP status; 0 without a response.
   */
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/**
 * @param {string} token Bearer token; may be empty.
 * @returns {Promise<Model[]>}
 */
export async function fetchModels(token) {
  const response = await request("v1/models", { headers: headers(token) });
  return (await response.json()).data;
}

/**
 * Yields the chunks of a completion.
 *
 * @param {string} path Of the route.
 * @param {object} body
 * @param {string} token Bearer token; may be empty.
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<Chunk, void>}
 * @throws {ApiError} The request was refused or failed, or the stream ended too early.
 */
export async function* streamCompletion(path, body, token, signal) {
  const options = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(token) },
    body: JSON.stringify(options),
    signal,
  });
  if (!response.body) throw new ApiError("The gateway's answer is empty.");
  try {
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message ?? "The completion failed.");
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
  }
  throw new ApiError("The connection ended before the completion did.");
}

/**
 * @param {string} path
 * @param {RequestInit} init
 * @returns {Promise<Response>}
 */
async function request(path, init) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", credentials: "omit", ...init });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiError("The gateway cannot be reached.");
  }
  if (response.ok) return response;
  throw new ApiError(await reasonOf(response), response.status);
}

/**
 * @param {Response} response
 * @returns {Promise<string>}
 */
async function reasonOf(response) {
  const answer = await response.json().catch(() => null);
  const message = answer?.error?.message ?? `The gateway answered ${response.status}.`;
  const wait = response.headers.get("Retry-After");
  return wait ? `${message} (try again in ${wait} s)` : message;
}

/**
 * @param {string} token
 * @returns {Record<string, string>}
 */
function headers(token) {
  return token ? { Authorization: `Bearer ${token}` } : {};
}
