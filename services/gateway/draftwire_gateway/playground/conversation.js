/** The conversation so far: what was asked and answered before. */

import { asElements } from "./markdown.js";
import { element } from "./page.js";

/** @typedef {{role: "user" | "assistant", content: string}} Message */

export class Conversation {
  /** @type {Message[]} */
  #messages = [];

  /** The answer that came last; empty before the first one. */
  get answer() {
    return this.#messages.at(-1)?.content ?? "";
  }

  /**
   * @param {string} question
   * @returns {Message[]} What is sent to ask a further question.
   */
  asking(question) {
    return [...this.#messages, { role: "user", content: question }];
  }

  /**
   * @param {string} question
   * @param {string} answer
   */
  add(question, answer) {
    this.#messages = [...this.asking(question), { role: "assistant", content: answer }];
  }

  clear() {
    this.#messages = [];
    this.show();
  }

  /** Shows all turns that were added. */
  show() {
    const turns = this.#messages.map(({ role, content }) => {
      const turn = document.createElement("li");
      turn.className = role;
      turn.append(role === "user" ? content : asElements(content));
      return turn;
    });
    element("turns").replaceChildren(...turns);
    element("conversation").hidden = turns.length === 0;
  }
}
