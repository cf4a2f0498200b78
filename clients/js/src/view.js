/**
 * A component's own view of something that is kept. It asks for nothing by itself: it shows what is
 * there, and holds it while something is begun on it.
 *
 * @typedef {import("./client.js").Client} Client
 * @typedef {import("./kept.js").Kept} Kept
 * @typedef {import("./questions.js").Question} Question
 */

import { keeperOf } from "./kept.js";

export class View {
  #client;
  #question;
  #keeper;
  /** @type {Kept | undefined} */
  #held;
  #users = 0;

  /** @param {Client} client @param {Question | undefined} question */
  constructor(client, question) {
    this.#client = client;
    this.#question = question;
    this.#keeper = keeperOf(client);
  }

  /** What is kept of it. */
  get kept() {
    return this.#held ?? (this.#question && this.#keeper.find(this.#question.text));
  }

  /** Be called after every change; gives what ends that. @param {() => void} tell */
  subscribe = (tell) => this.during((kept) => kept.subscribe(tell));

  /**
   * Hold it, with something begun on it, until that is ended.
   *
   * @param {(kept: Kept) => () => void} begin
   */
  during(begin) {
    const question = this.#question;
    if (!question) return () => {};
    const kept = (this.#held ??= this.#keeper.hold(this.#client, question));
    this.#users += 1;
    const end = begin(kept);
    return () => {
      end();
      this.#users -= 1;
      if (this.#users) return;
      this.#held = undefined;
      this.#keeper.release(question.text, kept);
    };
  }
}
