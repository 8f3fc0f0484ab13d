/** Statistics of a run: counted while it streams, replaced by the gateway's metrics at its end. */

/**
 * @typedef {import("./api.js").Token} Token
 * @typedef {import("./api.js").Metrics} Metrics
 * @typedef {{numDraftTokens: number, numDraftPositions: number, tokens: Token[], text: string}} Round
 */

export const SOURCES = /** @type {const} */ (["accepted", "recovered", "bonus", "plain"]);

/** Rounds that the strip shows. */
const NUM_LATEST = 120;

export class Tally {
  constructor() {
    this.numTokens = 0;
    this.numRounds = 0;
    /** Draft tokens that could all have been accepted: of a token tree, those of its longest path. */
    this.numDraftPositions = 0;
    this.numAccepted = 0;
    /** Rounds whose block had a token at this position. @type {number[]} */
    this.judged = [];
    /** Rounds that accepted the token at this position. @type {number[]} */
    this.accepted = [];
    /** Shown tokens by source. @type {Record<string, number>} */
    this.bySource = Object.fromEntries(SOURCES.map((source) => [source, 0]));
    /** Rounds by how many draft tokens they judged. @type {number[]} */
    this.byLength = [];
    /** The latest rounds, oldest first. @type {{drafted: number, accepted: number}[]} */
    this.latest = [];
    this.firstTokenMs = NaN;
    this.durationMs = NaN;
    /** @type {Metrics | null} */
    this.metrics = null;
    this.startedAt = performance.now();
    this.text = "";
  }

  /** @param {Round} round */
  add(round) {
    this.durationMs = performance.now() - this.startedAt;
    if (this.numTokens === 0) this.firstTokenMs = this.durationMs;
    this.numRounds += 1;
    this.text += round.text;
    this.numTokens += round.tokens.length;
    this.numDraftPositions += round.numDraftPositions;
    this.byLength[round.numDraftTokens] = (this.byLength[round.numDraftTokens] ?? 0) + 1;
    for (const token of round.tokens) this.bySource[token.source] += 1;
    const numAccepted = round.tokens.filter((token) => token.source === "accepted").length;
    this.numAccepted += numAccepted;
    this.latest = [...this.latest, { drafted: round.numDraftPositions, accepted: numAccepted }].slice(-NUM_LATEST);
    for (let place = 0; place < round.numDraftPositions; place += 1) {
      this.judged[place] = (this.judged[place] ?? 0) + 1;
      this.accepted[place] = (this.accepted[place] ?? 0) + (place < numAccepted ? 1 : 0);
    }
  }

  /** Rounds by draft length, as text: `0: 3, 4: 10`. @returns {string} */
  get lengths() {
    const shown = [...this.byLength.entries()].filter(([, count]) => (count ?? 0) > 0);
    return shown.map(([length, count]) => `${length}: ${count}`).join(", ");
  }

  /**
   * Rounds that were drafted for ahead of the verdict, of those that might have been, and those whose block came late;
   * empty if none might.
   *
   * @returns {string}
   */
  get ahead() {
    const { num_ahead_hits: hits = 0, num_ahead_late: late = 0, num_ahead_misses: misses = 0 } = this.metrics ?? {};
    const numRounds = hits + late + misses;
    return numRounds > 0 ? `${hits} of ${numRounds}${late > 0 ? `, ${late} late` : ""}` : "";
  }

  /** Draft tokens that were drafted ahead in vain, and the largest size of the blocks that were held. @returns {string} */
  get wasted() {
    const { num_ahead_wasted_tokens: wasted = 0, max_held_bytes: held = 0 } = this.metrics ?? {};
    return `${wasted}, ${(held / 1000).toFixed(1)} kB`;
  }

  /**
   * Replaces the counts by the gateway's, which include tokens that the last round accepted beyond the end of the text.
   *
   * @param {Metrics} metrics
   */
  settle(metrics) {
    this.metrics = metrics;
    this.numRounds = metrics.num_rounds;
    this.byLength = metrics.draft_length_histogram;
    this.numDraftPositions = metrics.num_draft_positions;
    this.numAccepted = metrics.num_accepted_draft_tokens;
    this.accepted = this.judged.map((_, place) => metrics.num_accepted_tokens_per_pos[place] ?? 0);
    this.firstTokenMs = metrics.time_to_first_token_ms;
    this.durationMs = metrics.duration_ms;
  }

  /** Tokens per forward pass of the target. */
  get blockEfficiency() {
    return this.metrics ? this.metrics.block_efficiency : this.numTokens / this.numRounds;
  }

  /** Accepted draft tokens over those that could have been; NaN if none were drafted. */
  get acceptanceRate() {
    return this.numAccepted / this.numDraftPositions;
  }

  get tokensPerSecond() {
    return (this.numTokens / this.durationMs) * 1000;
  }
}
