/**
 * A store of one row of a live query, by its key. Its listeners are called only when that row
 * changes.
 */

import { keyText } from "../state/replica.js";
import { Store } from "../store.js";

export class RowStore extends Store {
  #source;
  #key;
  #watched;
  /** @type {import("../protocol.js").Row | undefined} */
  #last;

  /**
   * @param {{state: any}} source
   * @param {import("../protocol.js").Key} key
   * @param {Map<string, RowStore>} watched the stores that have listeners, by the text of the key
   */
  constructor(source, key, watched) {
    super();
    this.#source = source;
    this.#key = key;
    this.#watched = watched;
  }

  /** The row; undefined while there is none. @returns {import("../protocol.js").Row | undefined} */
  get value() {
    return this.#source.state.replica.row(this.#key);
  }

  /** @override @param {() => void} listener @returns {() => void} */
  subscribe(listener) {
    const watched = this.#watched.get(keyText(this.#key));
    if (watched && watched !== this) return watched.subscribe(listener);
    if (!this.hasListeners) this.#last = this.value;
    this.#watched.set(keyText(this.#key), this);
    const end = super.subscribe(listener);
    return () => {
      end();
      if (this.hasListeners || this.#watched.get(keyText(this.#key)) !== this) return;
      this.#watched.delete(keyText(this.#key));
    };
  }

  /** The row may have changed. @param {boolean} [isForced] call the listeners in any case */
  refresh(isForced = false) {
    const { value } = this;
    if (isForced || value !== this.#last) this.changed();
    this.#last = value;
  }
}
