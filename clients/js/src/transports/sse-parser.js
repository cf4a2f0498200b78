/**
 * Parses Server-Sent Events: text in, in chunks of any size; the data of complete events out. Lines
 * end with LF, CR or CRLF. Comments and fields other than `data` are ignored: the messages need only
 * the data. The size of an event is limited, so that a broken server cannot fill the memory.
 */

import { HeadwaterError } from "../errors.js";
import { MESSAGE_CHARS_MAX } from "../limits.js";

export class SseParser {
  /** The start of an incomplete line, in parts. @type {string[]} */
  #tail = [];
  #tailSize = 0;
  /** @type {string[]} */
  #data = [];
  #dataSize = 0;
  #afterReturn = false;
  #charsMax;

  /** @param {number} [charsMax] */
  constructor(charsMax = MESSAGE_CHARS_MAX) {
    this.#charsMax = charsMax;
  }

  /** The data of the events that this completes. @param {string} chunk @returns {string[]} */
  feed(chunk) {
    // The second half of a CRLF.
    const text = this.#afterReturn && chunk.startsWith("\n") ? chunk.slice(1) : chunk;
    if (chunk) this.#afterReturn = chunk.endsWith("\r");
    const lines = text.split(/\r\n|\n|\r/);
    const rest = /** @type {string} */ (lines.pop());
    /** @type {string[]} */
    const events = [];
    for (const line of lines) {
      const whole = [...this.#tail, line].join("");
      this.#tail = [];
      this.#tailSize = 0;
      this.#take(whole, events);
    }
    if (rest) this.#tail.push(rest);
    this.#tailSize += rest.length;
    this.#check();
    return events;
  }

  /** @param {string} line @param {string[]} events */
  #take(line, events) {
    if (!line) {
      if (this.#data.length) events.push(this.#data.join("\n"));
      this.#data = [];
      this.#dataSize = 0;
    } else if (line.startsWith("data:")) {
      const value = line.slice(line[5] === " " ? 6 : 5);
      this.#data.push(value);
      this.#dataSize += value.length;
      this.#check();
    }
  }

  #check() {
    if (this.#dataSize + this.#tailSize <= this.#charsMax) return;
    throw new HeadwaterError("limit", `a message is larger than ${this.#charsMax} characters`, {
      hint: "Subscribe to fewer rows or columns.",
    });
  }
}
