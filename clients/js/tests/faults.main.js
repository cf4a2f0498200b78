/**
 * `faults.js` in a Node process of its own: works until its input ends, prints its records, and must
 * end by itself.
 */

import { connect } from "../src/index.js";
import { work } from "./faults.js";

const options = JSON.parse(process.argv[2]);
let isOver = false;
process.stdin.on("end", () => (isOver = true)).resume();

const onReady = () => void process.stdout.write("ready\n");
const report = await work(connect, { ...options, onReady, isOver: () => isOver });
process.stdout.write(JSON.stringify(report));
