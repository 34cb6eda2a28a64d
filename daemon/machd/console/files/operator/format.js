// Numbers, sizes and times as operators read them.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const ONE_DIGIT = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const UNITS = ["B", "kB", "MB", "GB", "TB"];
const NOTHING = "–";

/** A whole number with groups of three digits. */
export function count(number) {
  return number === null || number === undefined ? NOTHING : WHOLE.format(number);
}

/** A number of tokens a second. */
export function rate(number) {
  if (number === null || number === undefined) return NOTHING;
  return number >= 1000 ? WHOLE.format(number) : ONE_DIGIT.format(number);
}

/** Bytes with a decimal unit, three digits of them. */
export function bytes(number) {
  if (number === null || number === undefined) return NOTHING;
  let unit = 0;
  let scaled = number;
  while (scaled >= 999.5 && unit < UNITS.length - 1) {
    scaled /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || scaled >= 99.95 ? 0 : scaled >= 9.995 ? 1 : 2;
  return `${scaled.toFixed(digits)} ${UNITS[unit]}`;
}

/** Seconds as a time that is easy to compare: 283 ms, 4.2 s, 3 min 05 s, 2 h 04 min. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} days`;
}

/** As {@link duration}, in whole seconds, for what changes while one looks. */
export function age(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  return seconds < 59.5 ? `${Math.round(seconds)} s` : duration(seconds);
}

/** As {@link age}, in one unit, for what is an estimate. */
export function estimate(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

/** Milliseconds as {@link duration}. */
export function milliseconds(ms) {
  return duration(ms === null || ms === undefined ? null : ms / 1000);
}

/** A share from 0 to 1 in percent. */
export function percent(share) {
  return share === null || share === undefined ? NOTHING : `${Math.round(share * 100)} %`;
}

/** Time of day of a moment, with its date if that is not today. */
export function moment(at) {
  const date = new Date(at);
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  if (date.toDateString() === new Date().toDateString()) return time;
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}`;
}

/** A number with its noun. */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function two(number) {
  return String(number).padStart(2, "0");
}
