// Charts: each figure with data-chart draws what that address answers, again at each tick.
(() => {
  const units = {
    count: (v) => v.toLocaleString("en", { maximumFractionDigits: 1 }),
    rate: (v) => `${v.toLocaleString("en", { maximumFractionDigits: 1 })}/s`,
    share: (v) => `${Math.round(v * 100)} %`,
    bytes: (v) => (v >= 2 ** 30 ? `${(v / 2 ** 30).toFixed(1)} GiB` : `${(v / 2 ** 20).toFixed(1)} MiB`),
  };
  const plots = new Map();

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const clock = (seconds, narrow) => new Date(seconds * 1000).toLocaleTimeString("en-GB", narrow ? {} : { hour: "2-digit", minute: "2-digit" });

  const latest = (plot) => { if (plot.cursor.idx == null && plot.data[0].length) plot.setLegend({ idx: plot.data[0].length - 1 }, false); };

  const options = (figure, labels, width) => {
    const show = units[figure.dataset.unit] || units.count;
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    return {
      width, height: 180, cursor: { y: false }, padding: [8, 8, 0, 0],
      scales: { y: { range: (u, min, max) => [0, figure.dataset.unit === "share" ? 1 : Math.max(max * 1.1, 1)] } },
      axes: [{ ...axis, space: 70, size: 28, values: (u, at) => at.map((v) => clock(v, at.length > 1 && at[1] - at[0] < 60)) }, { ...axis, size: 62, values: (u, values) => values.map((v) => (v === null ? "" : show(v))) }],
      hooks: { setCursor: [latest], setData: [latest], ready: [latest] },
      series: [{ label: "at", value: (u, v) => (v == null ? "" : clock(v, true)) },
        ...labels.map((label, n) => ({ label, stroke: colour(`--chart-${n % 4 + 1}`), width: 2, spanGaps: true, points: { show: false },
          fill: labels.length === 1 ? colour("--chart-fill") : undefined, value: (u, v) => (v == null ? "–" : show(v)) }))],
    };
  };

  const draw = async (figure) => {
    let told;
    try {
      const answer = await fetch(figure.dataset.chart, { signal: AbortSignal.timeout(4000) });
      if (!answer.ok) return;
      told = await answer.json();
    } catch { return; }
    const data = [told.times, ...told.values], place = figure.querySelector(".plot");
    const known = plots.get(figure), key = told.labels.join("\n");
    if (known && known.key === key) return known.plot.setData(data);
    known?.plot.destroy();
    if (told.labels.length) plots.set(figure, { key, plot: new uPlot(options(figure, told.labels, place.clientWidth), data, place) });
  };

  const all = () => document.querySelectorAll("[data-chart]").forEach(draw);
  document.body.addEventListener("tick", all);
  addEventListener("theme", () => { plots.forEach(({ plot }) => plot.destroy()); plots.clear(); all(); });
  addEventListener("resize", () => plots.forEach(({ plot }, figure) => plot.setSize({ width: figure.querySelector(".plot").clientWidth, height: 180 })));
  all();
})();
