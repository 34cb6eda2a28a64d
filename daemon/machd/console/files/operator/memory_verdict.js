// Whether the machine has memory enough, in words.

import { bytes } from "./format.js";

const SOME_PRESSURE = 1; // percent of the time in which a process waits for memory
const HIGH_PRESSURE = 10;
const LOW_SHARE = 0.05; // of the machine's memory

/**
 * @param {{available_bytes: number, total_bytes: number, pressure: number | null}} memory As the overview has it.
 * @returns {{text: string, className: string}}
 */
export function memoryVerdict({ available_bytes: free, total_bytes: total, pressure }) {
  const words = [`${bytes(free)} free`];
  const isLow = free < LOW_SHARE * total;
  if (isLow) words.push("almost full");
  if (pressure !== null) words.push(pressureWords(pressure));
  const isBad = pressure !== null && pressure >= HIGH_PRESSURE;
  const isWarning = isLow || (pressure !== null && pressure >= SOME_PRESSURE);
  return { text: words.join(", "), className: isBad ? "bad" : isWarning ? "warning" : "" };
}

function pressureWords(pressure) {
  if (pressure < SOME_PRESSURE) return "no pressure";
  return `${pressure < HIGH_PRESSURE ? "some" : "high"} pressure (${Math.round(pressure)} %)`;
}
