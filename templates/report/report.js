"use strict";
(() => {
  const zh = {
    removed: "已从报告中移除", removed_text: "同一个值在整个报告中对应同一个代称。本文件不含原值。", rule: "规则", word: "代称",
    values: "不同的值", rule_run: "运行编号", rule_node: "节点名", rule_host: "其他主机名和域名", rule_address: "IP 地址",
    rule_hardware: "MAC 地址和 GUID", rule_user: "用户名", rule_email: "电子邮件地址", rule_folder: "文件夹", rule_url: "网址",
    rule_labelled: "带标签的机密(如 password=)", rule_token: "已知格式的令牌", rule_pem: "密钥和证书(PEM)",
    rule_random: "随机字母和数字", rule_identifier: "UUID 和指纹",
    comparison: "运行对比", written: "生成工具:clusterctl", summary: "概要", differences: "差异", curves: "曲线",
    diagnosis: "诊断", attempts: "重启", nodes: "节点", configuration: "配置", events: "事件", run: "运行", state: "状态",
    node_count: "节点数", started: "开始时间", duration: "时长", last_step: "最后一步", last_loss: "最后的损失",
    speed: "词元/秒(中位数)", restarts: "重启次数", effective: "有效训练时间", release: "环境版本", live: "生成报告时该运行仍在进行。",
    no_files: "以下节点没有文件:", no_numbers: "日志中没有步数和损失。", not_finite: "损失为 NaN 或无穷大的步数:",
    first_step: "首次出现在第", jumped: "运行期间以下节点的时钟发生了回退:",
    unknown: "未比较(并非每个运行都有记录):", no_difference: "没有已知差异。", likely: "最可能导致不同表现的差异排在最前。",
    more_differences: "未列出的其他差异:", type: "类别", d_check: "启动前检查", d_mixed: "节点之间不一致", d_argument: "参数",
    d_setting: "配置", d_written: "配置文件", d_variable: "环境变量", d_file: "文件", d_data: "数据", d_package: "软件包", d_release: "环境版本",
    d_hardware: "机器", d_nodes: "节点", d_follows: "由上述差异得出", line: "行", step: "步", loss: "损失", eval_loss: "评估损失",
    lr: "学习率", grad_norm: "梯度范数", tokens_per_second: "词元/秒", ms: "毫秒/步", restart: "重启", time: "时间",
    text: "内容", cause: "原因", node: "节点", rank: "编号", gpu: "GPU 利用率(%)", gpu_memory: "GPU 显存(GiB)",
    memory: "已用内存(GiB)", network: "网络(MB/s)", power: "GPU 功率(W)", temperature: "GPU 温度(°C)",
    sm_clock: "最慢 GPU 的 SM 时钟(MHz)", throttled: "因温度或硬件而降频的 GPU 数", port: "各网络接口(MB/s)",
    samples: "采样数", slowest: "最慢的进程", preflight: "启动前的检查", verdict: "结论", check: "检查项", fix: "处理办法",
    v_passed: "通过", v_failed: "失败", v_warned: "警告", v_unknown: "未知", v_inapplicable: "不适用", left_out: "未参加",
    name: "名称", value: "值", kind: "事件", older: "未列出的较早事件:", elapsed: "经过时间",
    clock: "时刻", align: "横轴", smooth: "平滑", log: "损失用对数轴", marks: "显示事件", in: "放大", out: "缩小",
    left: "左移", right: "右移", reset: "全部", keys: "拖动可放大,双击复原;选中曲线后可用 ← → + - 0 键。", chart: "曲线",
    expected: "预期", expected_step: "每步的预期时间:", measured_step: "实测中位数:", no_band: "没有预期的每步时间:",
  };
  const chinese = (navigator.languages?.[0] || navigator.language || "").toLowerCase().startsWith("zh");
  const say = (key, english) => (chinese && zh[key]) || english;
  if (chinese) {
    document.documentElement.lang = "zh";
    for (const each of document.querySelectorAll("[data-i]")) if (zh[each.dataset.i]) each.textContent = zh[each.dataset.i];
  }

  const unpack = (packed) => {
    if (!packed) return null;
    if ("n" in packed) return Array.from({length: packed.n}, (_, place) => packed.start + place * packed.by);
    const text = atob(packed.f ?? packed.d), bytes = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
    return packed.f === undefined ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
  };
  const once = (make) => { let made; return () => (made ??= make()); };

  // Time since the start: a clock that goes back adds nothing. A value without a time has the time before it.
  const elapsed = (times, began) => {
    const found = new Float64Array(times.length);
    let sum = 0, before = began;
    for (let at = 0; at < times.length; at++) {
      const time = times[at];
      if (time === time) { if (time > before) sum += time - before; before = time; }
      found[at] = sum;
    }
    return found;
  };
  const column = (owner, began) => {
    const step = once(() => unpack(owner.step)), time = once(() => unpack(owner.time));
    return {
      step, clock: time, elapsed: once(() => time() && elapsed(time(), began)),
      values: Object.fromEntries(Object.entries(owner.columns).map(([key, packed]) => [key, once(() => unpack(packed))])),
    };
  };
  const runs = JSON.parse(document.getElementById("data").textContent).runs.map((run) => ({
    ...run, rows: column(run, run.began), samples: run.nodes.map((node) => ({name: node.name, ...column(node, run.began)})),
  }));

  const titles = [
    ["loss", "Loss"], ["eval_loss", "Evaluation loss"], ["lr", "Learning rate"], ["tokens_per_second", "Tokens per second"],
    ["ms", "Milliseconds per step"], ["grad_norm", "Gradient norm"], ["gpu", "GPU utilisation, %"],
    ["gpu_memory", "GPU memory, GiB"], ["memory", "Memory used, GiB"], ["network", "Network, MB/s"], ["power", "GPU power, W"],
    ["temperature", "GPU temperature, °C"], ["sm_clock", "Slowest GPU's SM clock, MHz"],
    ["throttled", "GPUs slowed down by heat or hardware"], ["port", "Network by interface, MB/s"],
  ];
  const has = (mode) => runs.some((run) => mode === "step" ? unpack(run.step)?.length : run.time || run.nodes.length);
  const state = {mode: has("step") ? "step" : "elapsed", smooth: 0, log: false, marks: true, range: null, print: false};
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const charts = [], CELLS = 4e6;
  const root = document.getElementById("charts");
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  // The curves of one chart: a run's column, or one for each of its nodes.
  const curvesOf = (key) => runs.flatMap((run, number) => {
    const own = run.rows.values[key];
    if (own) return [{run, number, name: run.id, owner: run.rows, values: own, bad: run.bad[key] || []}];
    return run.samples.flatMap((node) => Object.keys(node.values).filter((name) => name === key || name.startsWith(`${key} `)).map((name) => ({
      run, number, name: (runs.length > 1 ? `${run.id} ${node.name}` : node.name) + name.slice(key.length), owner: node, values: node.values[name], bad: [],
    })));
  });

  // One curve's points by x, in order; without a value or a place it has none.
  const points = (curve) => {
    const all = curve.values(), place = curve.owner[state.mode]();
    if (!place) return null;
    let xs = [], ys = [], sorted = true, before = -Infinity;
    const bad = new Set(curve.bad);
    for (let at = 0; at < all.length; at++) {
      const x = place[at], y = all[at];
      if (x !== x || x === null || (y !== y && !bad.has(at))) continue;
      if (x < before) sorted = false;
      before = x;
      xs.push(x);
      ys.push(Number.isFinite(y) ? y : null);
    }
    if (!sorted) {
      const order = Array.from(xs.keys()).sort((a, b) => xs[a] - xs[b]);
      [xs, ys] = [order.map((at) => xs[at]), order.map((at) => ys[at])];
    }
    return [xs, ys];
  };
  const smoothed = (values, weight) => {
    let mean = 0, sum = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      mean = mean * weight + value * (1 - weight);
      sum = sum * weight + (1 - weight);
      return mean / sum;
    });
  };

  const span = (seconds) => {
    const whole = Math.round(seconds), two = (number) => String(number).padStart(2, "0");
    const days = Math.floor(whole / 86400), rest = `${Math.floor(whole / 3600) % 24}:${two(Math.floor(whole / 60) % 60)}`;
    return (days ? `${days}d ` : "") + (whole < 86400 ? `${rest}:${two(whole % 60)}` : rest);
  };
  const short = (value) => value === null || value === undefined ? "–" : Math.abs(value) >= 1e9 || (value && Math.abs(value) < 1e-3)
    ? (+value.toPrecision(4)).toExponential() : Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(5));

  // Vertical lines: restarts, hangs, ends, warnings; short red ones at the top: values that are not finite.
  const markers = (curves, colours) => (plot) => {
    const {ctx, bbox} = plot;
    const line = (x, colour, height, dashed) => {
      const at = plot.valToPos(x, "x", true);
      if (!(at >= bbox.left && at <= bbox.left + bbox.width)) return;
      ctx.strokeStyle = colour;
      ctx.setLineDash(dashed ? [4, 4] : []);
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + height);
      ctx.stroke();
    };
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const curve of curves) for (const at of curve.bad) {
      const place = curve.owner[state.mode]();
      if (place) line(place[at], colours.bad, 10 * devicePixelRatio, false);
    }
    if (state.marks) for (const run of new Set(curves.map((curve) => curve.run))) for (const event of run.events) {
      const x = {step: event.s, clock: event.t, elapsed: Math.max(0, event.t - run.began)}[state.mode];
      if (x !== null) line(x, event.l === "bad" ? colours.bad : colours.note, bbox.height, true);
    }
    ctx.restore();
  };

  // The expected ranges, behind the curves.
  const bandsOf = (key) => runs.flatMap((run, number) => run.bands[key] ? [{number, low: run.bands[key][0], high: run.bands[key][1]}] : []);
  const behind = (bands, colours) => (plot) => {
    const {ctx, bbox} = plot;
    ctx.save();
    for (const {number, low, high} of bands) {
      const top = Math.max(bbox.top, plot.valToPos(high, "y", true)), end = Math.min(bbox.top + bbox.height, plot.valToPos(low, "y", true));
      ctx.fillStyle = colours.curves[number % 8] + "28";
      ctx.fillRect(bbox.left, top, bbox.width, Math.max(1, end - top));
    }
    ctx.restore();
  };

  const palette = () => {
    const style = getComputedStyle(document.documentElement), get = (name) => style.getPropertyValue(name).trim();
    const light = {fg: "#1c2024", dim: "#5c636b", line: "#d5d9de", bad: "#b3261e", note: "#7a4d00"};
    const lightCurves = ["#0b62c4", "#b5490b", "#1a7f37", "#8a3ffc", "#b3266e", "#00747a", "#7a5c00", "#57606a"];
    if (state.print) return {...light, curves: lightCurves};
    return {...Object.fromEntries(Object.keys(light).map((key) => [key, get(`--${key}`)])), curves: lightCurves.map((_, at) => get(`--c${at}`))};
  };

  // Joined curves have a cell for each x of any. Many curves get common places, with the mean of the values near each.
  const together = (tables) => {
    const longest = Math.max(...tables.map(([xs]) => xs.length));
    if (tables.reduce((sum, [xs]) => sum + xs.length, 0) * tables.length <= CELLS || longest < 2) return tables;
    const low = Math.min(...tables.map(([xs]) => xs[0])), high = Math.max(...tables.map(([xs]) => xs[xs.length - 1]));
    const count = Math.max(50, Math.min(longest, Math.floor(CELLS / tables.length))), wide = (high - low) / count || 1;
    return tables.map(([xs, ys]) => {
      const places = [], means = [];
      let last = -1, some = 0;
      xs.forEach((x, at) => {
        const place = Math.round((x - low) / wide), y = ys[at];
        if (place !== last) { places.push(low + place * wide); means.push(y); last = place; some = y === null ? 0 : 1; } else if (y !== null) {
          const end = means.length - 1;
          means[end] = ((means[end] ?? 0) * some + y) / ++some;
        }
      });
      return [places, means];
    });
  };

  const draw = (chart) => {
    chart.plot?.destroy();
    chart.plot = null;
    const colours = palette();
    const tables = [], used = [];
    for (const curve of curvesOf(chart.key)) {
      const found = points(curve);
      if (found && found[0].length) { tables.push(found); used.push(curve); }
    }
    chart.figure.hidden = !tables.length;
    if (!tables.length) return;
    const data = tables.length > 1 ? uPlot.join(together(tables)) : tables[0];
    const bands = bandsOf(chart.key);
    const many = used.length > 12, loss = chart.key.endsWith("loss") || chart.key === "grad_norm";
    const finite = data.slice(1).some((values) => values.some((value) => value != null));
    const positive = finite && data.slice(1).every((values) => values.every((value) => value == null || value > 0));
    const scale = !finite ? {range: [0, 1]} : state.log && loss && positive ? {distr: 3} : bands.length ? {range: (_, low, high) =>
      uPlot.rangeNum(Math.min(low, ...bands.map((band) => band.low)), Math.max(high, ...bands.map((band) => band.high)), 0.1, true)} : {};
    const series = [{label: say(state.mode === "clock" ? "time" : state.mode, state.mode === "step" ? "Step" : "Time"),
      value: (_, x) => x === null ? "–" : state.mode === "step" ? String(x) : state.mode === "elapsed" ? span(x) : new Date(x * 1000).toLocaleString()}];
    const shown = [data[0]];
    used.forEach((curve, at) => {
      const colour = colours.curves[at % 8], ys = data[at + 1], one = ys.length - ys.reduce((sum, y) => sum + (y == null), 0) < 2;
      const base = {stroke: colour, value: (_, y) => short(y), points: {show: one}, dash: at >= 8 ? [6, 3] : undefined};
      if (state.smooth > 0) {
        shown.push(ys, smoothed(ys, state.smooth));
        series.push({...base, label: "", stroke: colour + "55", class: "raw"}, {...base, label: curve.name, width: 2});
      } else { shown.push(ys); series.push({...base, label: curve.name, width: 1.25}); }
    });
    const axis = {stroke: colours.dim, grid: {stroke: colours.line, width: 1}, ticks: {stroke: colours.line}, font: "12px system-ui, sans-serif"};
    chart.plot = new uPlot({
      width: Math.max(200, chart.place.clientWidth), height: 240, series, padding: [10, 32, 0, 0],
      scales: {x: {time: state.mode === "clock"}, y: scale},
      axes: [{...axis, values: state.mode === "elapsed" ? (_, ticks) => ticks.map(span) : undefined, space: 70},
        {...axis, size: 66, values: (_, ticks) => ticks.map((tick) => tick === null ? "" : short(tick))}],
      legend: {show: !many}, focus: {alpha: many ? 0.25 : 1}, cursor: {focus: {prox: many ? 24 : -1}, sync: {key: "all", setSeries: false}},
      hooks: {
        drawAxes: [behind(bands, colours)],
        draw: [markers(used, colours)],
        setScale: [(plot, key) => {
          if (key !== "x") return;
          chart.figure.dataset.range = `${plot.scales.x.min} ${plot.scales.x.max}`;
          if (chart.plot === plot && !sharing) share(plot);
        }],
        setSeries: [(_, at) => { if (many) chart.focus.textContent = at === null ? "" : series[at]?.label || ""; }],
      },
    }, shown, chart.place);
    chart.figure.dataset.drawn = Math.round(performance.now());
    const first = data[0][0], last = data[0][data[0].length - 1];
    chart.all = first < last ? [first, last] : [first - 0.5, first + 0.5];
    chart.place.querySelectorAll(".u-series").forEach((row, at) => { row.hidden = series[at]?.label === ""; });
    for (const label of chart.place.querySelectorAll(".u-legend th")) {
      label.tabIndex = 0;
      label.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); label.click(); } });
    }
    const values = data.slice(1).flatMap((ys) => { let lo = Infinity, hi = -Infinity; for (const y of ys) if (y != null) { if (y < lo) lo = y; if (y > hi) hi = y; } return lo <= hi ? [lo, hi] : []; });
    chart.place.setAttribute("aria-label", `${chart.title}: ${short(Math.min(...values))} – ${short(Math.max(...values))}${chart.band && `; ${chart.band}`}`);
    if (state.range) zoom(chart, state.range);
  };

  let sharing = false;
  const zoom = (chart, range) => {
    if (chart.plot) chart.plot.setScale("x", {min: range[0], max: range[1]});
  };
  const ends = () => charts.filter((chart) => chart.plot).reduce((all, chart) => [Math.min(all[0], chart.all[0]), Math.max(all[1], chart.all[1])], [Infinity, -Infinity]);
  const apply = (range) => {
    sharing = true;
    state.range = range;
    for (const chart of charts) zoom(chart, range || chart.all);
    requestAnimationFrame(() => { sharing = false; });
  };
  const share = (plot) => {
    const {min, max} = plot.scales.x, all = charts.find((chart) => chart.plot === plot).all;
    apply(min <= all[0] && max >= all[1] ? null : [min, max]);
  };
  const move = (by, factor) => {
    const all = ends(), [min, max] = state.range || all, wide = (max - min) * factor, middle = (min + max) / 2 + (max - min) * by;
    if (wide >= all[1] - all[0]) return apply(null);
    const start = Math.min(Math.max(middle - wide / 2, all[0]), all[1] - wide);
    apply([start, start + wide]);
  };
  const actions = {in: () => move(0, 0.5), out: () => move(0, 2), left: () => move(-0.25, 1), right: () => move(0.25, 1), reset: () => apply(null)};
  const keys = {"+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "reset"};

  const redraw = () => { for (const chart of charts) if (chart.drawn) draw(chart); };
  const need = (chart) => { if (!chart.drawn) { chart.drawn = true; draw(chart); } };

  // Controls
  const control = (key, english, element) => make("label", {}, say(key, english), element);
  const modes = [["step", "Step"], ["elapsed", "Time since the start"], ["clock", "Time of day"]].filter(([mode]) => has(mode));
  const align = make("select", {id: "align"}, ...modes.map(([mode, english]) => make("option", {value: mode, textContent: say(mode, english), selected: mode === state.mode})));
  align.onchange = () => { state.mode = align.value; state.range = null; redraw(); };
  const smooth = make("input", {type: "range", min: "0", max: "0.99", step: "0.01", value: "0", id: "smooth"});
  smooth.onchange = () => { state.smooth = +smooth.value; redraw(); };
  const log = make("input", {type: "checkbox", id: "log"});
  log.onchange = () => { state.log = log.checked; redraw(); };
  const marks = make("input", {type: "checkbox", checked: true, id: "marks"});
  marks.onchange = () => { state.marks = marks.checked; for (const chart of charts) chart.plot?.redraw(); };
  const button = (key, sign, english) => {
    const element = make("button", {type: "button", textContent: sign, title: say(key, english)});
    element.setAttribute("aria-label", say(key, english));
    element.onclick = actions[key];
    return element;
  };
  root.append(
    make("div", {className: "tools"}, control("align", "Align by", align), control("smooth", "Smoothing", smooth), control("log", "Logarithmic loss", log),
      control("marks", "Events", marks), make("span", {}, button("left", "←", "Move left"), " ", button("right", "→", "Move right"), " ",
        button("in", "+", "Zoom in"), " ", button("out", "−", "Zoom out"), " ", button("reset", "↔", "Show all"))),
    make("p", {className: "hint", textContent: say("keys", "Drag to zoom, double-click to show all; with a curve in focus also ← → + - 0.")}),
  );
  const grid = root.appendChild(make("div", {className: "grid"}));
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) need(charts.find((chart) => chart.figure === entry.target));
  }, {rootMargin: "100px"});
  for (const [key, english] of titles) {
    if (!curvesOf(key).length) continue;
    const band = bandsOf(key).map(({low, high}) => `${say("expected", "expected")} ${short(low)} – ${short(high)}`).join(", ");
    const title = say(key, english), focus = make("span", {className: "hint"});
    const place = make("div", {className: "plot", tabIndex: 0});
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", title);
    const figure = grid.appendChild(make("figure", {}, make("figcaption", {}, title, " ", make("span", {className: "hint", textContent: band}), " ", focus), place));
    figure.dataset.key = key;
    place.addEventListener("keydown", (event) => {
      const action = keys[event.key];
      if (action && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); actions[action](); }
    });
    charts.push({key, title, band, figure, place, focus, plot: null, drawn: false, all: [0, 1]});
    watcher.observe(figure);
  }
  if (!charts.length) root.replaceChildren();
  let wide = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === wide) return;
    wide = innerWidth;
    for (const chart of charts) chart.plot?.setSize({width: Math.max(200, chart.place.clientWidth), height: 240});
  });
  dark.addEventListener("change", redraw);
  addEventListener("beforeprint", () => { state.print = true; for (const chart of charts) chart.drawn = true; redraw(); });
  addEventListener("afterprint", () => { state.print = false; redraw(); });
})();
