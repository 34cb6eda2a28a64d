// A chart of the last hour, drawn anew when a sample comes.

import { html, useEffect, useRef } from "/console/vendor/htm-preact.js";

const HOUR_S = 3600;
const LEAST_S = 600; // shown of a daemon that has run for less than an hour
const HEIGHT_PX = 170;
const AXIS_PX = 72;

let loading;

/** Fetch uPlot when it is first needed; it is a classic script. */
function loadPlots() {
  loading ??= new Promise((resolve, reject) => {
    const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: "/console/vendor/uplot.css" });
    const script = Object.assign(document.createElement("script"), { src: "/console/vendor/uplot.js", onload: () => resolve(uPlot), onerror: reject });
    document.head.append(style, script);
  });
  return loading;
}

/**
 * @param {object} props
 * @param {object[]} props.samples The oldest first; `at` in seconds since 1970.
 * @param {{field: string, colour: string, dash?: number[]}[]} props.series `colour` is the name of a CSS variable.
 * @param {(number: number) => string} props.unit
 * @param {boolean} props.isStacked Whether each series lies on those before it.
 * @param {(index: number | null) => void} props.onPoint
 */
export function Chart({ label, samples, series, unit, isStacked, onPoint }) {
  const place = useRef(null);
  const plot = useRef(null);
  const data = useRef(null);
  data.current = columnsOf(samples, series, isStacked);

  useEffect(() => {
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    let isGone = false;
    const draw = async () => {
      const Plot = await loadPlots();
      if (isGone) return;
      plot.current?.destroy();
      plot.current = new Plot(options(place.current, series, unit, isStacked, onPoint), data.current, place.current);
    };
    const resized = new ResizeObserver(() => plot.current?.setSize({ width: place.current.clientWidth, height: HEIGHT_PX }));
    resized.observe(place.current);
    scheme.addEventListener("change", draw);
    draw();
    return () => {
      isGone = true;
      resized.disconnect();
      scheme.removeEventListener("change", draw);
      plot.current?.destroy();
    };
  }, []);
  useEffect(() => {
    plot.current?.setData(data.current);
  }, [samples]);
  return html`<div class="chart" role="img" aria-label=${label} ref=${place}></div>`;
}

/** Times, and one list of values a series; those of a stack from the top one down, so that lower ones are drawn over it. */
function columnsOf(samples, series, isStacked) {
  const times = samples.map((one) => one.at);
  const values = series.map(({ field }) => samples.map((one) => one[field]));
  if (!isStacked) return [times, ...values];
  const sums = values.map((_, top) => times.map((__, at) => values.slice(0, top + 1).reduce((sum, one) => sum + one[at], 0)));
  return [times, ...sums.reverse()];
}

function options(place, series, unit, isStacked, onPoint) {
  const style = getComputedStyle(place);
  const colourOf = (name) => style.getPropertyValue(name).trim();
  const lines = series.map(({ label, colour, dash }) => ({
    label,
    stroke: colourOf(colour),
    width: isStacked ? 1 : 2,
    fill: isStacked ? colourOf(colour) : undefined,
    dash,
    points: { show: false },
  }));
  const axis = {
    stroke: colourOf("--muted"),
    font: `12px ${style.fontFamily}`,
    grid: { stroke: colourOf("--line"), width: 1 },
    ticks: { stroke: colourOf("--line"), width: 1 },
  };
  return {
    width: place.clientWidth,
    height: HEIGHT_PX,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { show: !isStacked } },
    scales: {
      x: { time: true, range: (_, first, last) => [Math.max(last - HOUR_S, Math.min(first, last - LEAST_S)), last] },
      y: { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] },
    },
    axes: [
      { ...axis, values: "{HH}:{mm}" },
      { ...axis, size: AXIS_PX, values: (_, ticks) => ticks.map(unit) },
    ],
    series: [{}, ...(isStacked ? lines.reverse() : lines)],
    hooks: { setCursor: [(shown) => onPoint(shown.cursor.idx ?? null)] },
  };
}
