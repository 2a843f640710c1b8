const $ = id => document.getElementById(id), css = name => `var(--${name})`;
const number = (x, digits = 0) => x.toLocaleString('en', {maximumFractionDigits: digits, minimumFractionDigits: digits});
const many = (n, word) => `${number(n)} ${word}${n === 1 ? '' : 's'}`;
const put = (e, text) => { if (e.textContent !== text) e.textContent = text; };          // what stays is left alone: a reader may be in it
function el(tag, attrs = {}, ...content) {
  const svg = ['rect', 'path'].includes(tag), e = svg ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const [k, v] of Object.entries(attrs)) k.startsWith('on') ? e.addEventListener(k.slice(2), v) : e.setAttribute(k, v);
  e.append(...content);
  return e;
}
const seen = t => t.trim() ? t : JSON.stringify(t).slice(1, -1).replaceAll(' ', '␣');
const calm = matchMedia('(prefers-reduced-motion: reduce)'), dark = matchMedia('(prefers-color-scheme: dark)');
const kept = name => { try { return sessionStorage.getItem(name) || ''; } catch { return ''; } };
const keep = (name, value) => { try { value ? sessionStorage.setItem(name, value) : sessionStorage.removeItem(name); } catch { /* for this page alone */ } };

let redraw = () => {};
function scheme(to) {
  document.documentElement.style.colorScheme = to;
  readTones();
  redraw();
}
$('theme').onclick = () => {
  scheme((document.documentElement.style.colorScheme || (dark.matches ? 'dark' : 'light')) === 'dark' ? 'light' : 'dark');
  keep('batchlab-scheme', document.documentElement.style.colorScheme);
};
dark.onchange = () => scheme(document.documentElement.style.colorScheme);
addEventListener('resize', () => redraw());

const KINDS = {d: 'decode', b: 'decode', p: 'prefill', a: 'again', h: 'held', c: 'cached', w: 'blocked'};
let steps = [], tones = {}, place = {};                                                    // of a step: letters, tokens decoded, of prompts, padded
function readTones() {                                                                     // a canvas knows no CSS variables
  const probe = document.body.appendChild(el('i'));
  for (const k of ['ground', 'edge', 'ink', 'dim', 'on', 'idle', 'held', 'decode', 'prefill', 'again', 'cached', 'blocked', 'padded']) {
    probe.style.color = css(k);
    tones[k] = getComputedStyle(probe).color;
  }
  probe.remove();
}
function sharp(canvas, high) {                                                             // its context, in pixels of the page
  const wide = canvas.clientWidth, ratio = devicePixelRatio || 1, g = canvas.getContext('2d');
  if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) {
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(high * ratio);
    canvas.style.height = `${high}px`;
  }
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, wide, high);
  return [g, wide];
}

function drawRoll(seats, whole = false, faint = () => false) {                             // a column for each step, a row for each slot
  const lanes = Math.max(1, Math.min(seats, steps.reduce((m, s) => Math.max(m, s[0].length), whole ? 1 : 8)));
  const lane = Math.max(2, Math.min(whole ? 17 : 14, Math.floor(280 / lanes))), gap = lane > 4 ? 1 : 0, top = lanes * lane, high = top + 62, left = 34;
  const [g, wide] = sharp($('roll'), high), room = wide - left, size = wide > 500 ? 4 : 3;
  const n = Math.min(steps.length, whole ? room : Math.floor(room / size)), unit = whole ? room / n : size;
  const right = whole ? wide : left + Math.floor(room / size) * size, begin = right - n * unit, first = steps.length - n;
  const at = k => whole ? Math.floor(k * steps.length / n) : first + k, edge = k => Math.round(begin + k * unit);
  let most = 8;
  for (let k = 0; k < n; k++) most = Math.max(most, steps[at(k)][1] + steps[at(k)][2] + (steps[at(k)][3] || 0));
  place = {begin, span: right - begin, lane, top};
  g.fillStyle = tones.idle;
  for (let i = 0; i < lanes; i++) g.fillRect(left, i * lane, right - left, lane - gap);
  for (let k = 0; k < n; k++) {
    const [cells, decode, prefill, padded = 0] = steps[at(k)], x = edge(k), w = edge(k + 1) - x;
    for (let i = 0; i < cells.length && i < lanes; i++) {
      const letter = cells[i].toLowerCase(), kind = KINDS[letter], thin = letter === 'b' ? Math.floor((lane - gap) / 2) : 0;
      if (!kind) continue;
      g.globalAlpha = faint(at(k), i) ? .2 : 1;
      g.fillStyle = tones[kind];
      g.fillRect(x, i * lane + thin, w, lane - gap - thin);
      if (letter !== cells[i] && w > 2) { g.fillStyle = tones.ink; g.fillRect(x, i * lane, 1, lane - gap); }
      g.globalAlpha = 1;
    }
    let y = high - 4;
    for (const [count, kind] of [[decode, 'decode'], [prefill, 'prefill'], [padded, 'padded']]) {
      g.fillStyle = tones[kind];
      g.fillRect(x, y -= 46 * count / most, w > 2 ? w - 1 : w, 46 * count / most);
    }
  }
  g.fillStyle = tones.dim;
  g.font = '11px system-ui, sans-serif';
  g.textAlign = 'right';
  for (let i = 0, named = -99; i < lanes; i++) if (i * lane - named >= 13) { named = i * lane; g.fillText(i, left - 6, i * lane + Math.min(lane, 13) - 2); }
  g.fillText(number(most), left - 6, high - 44);
  g.fillText('0', left - 6, high - 3);
  g.fillRect(left, high - 3, right - left, 1); return [g, lanes];
}

const ROWS = 40;
function showSlots(s) {
  const body = $('slots'), rows = s.slots.slice(0, ROWS);
  while (body.rows.length > rows.length) body.deleteRow(-1);
  while (body.rows.length < rows.length) body.append(el('tr', {}, el('th', {scope: 'row'}), el('td', {}, el('i', {class: 'dot'}), el('span')),
    el('td', {class: 'wide'}, el('span', {class: 'bar'}, el('i'), el('i'), el('i'))), el('td', {class: 'num'}), el('td', {class: 'num'})));
  rows.forEach(([slot, id, phase, prompt, computed, cached, out, max, batch, whose = ''], k) => {
    const [a, b, c, d, e] = body.rows[k].cells, read = Math.min(computed, prompt), found = Math.min(cached, read);
    const whole = Math.max(1, prompt + Math.max(out, max || 0));                           // a bar is full at the request's own end
    put(a, String(slot));
    b.firstChild.style.background = css(phase);
    put(b.lastChild, `${whose}${phase}${batch ? ', batch' : ''}`);
    body.rows[k].title = `request ${id}`;
    [[found, 'cached'], [read - found, 'prefill'], [out, 'decode']].forEach(([n, kind], j) => {
      const bar = c.firstChild.children[j].style;
      bar.width = `${100 * n / whole}%`;
      bar.background = css(kind);
    });
    put(d, `${number(read)}/${number(prompt)}`);
    put(e, max ? `${number(out)}/${number(max)}` : number(out));
  });
  const more = s.slots.length - rows.length;
  put($('more'), rows.length ? (more ? `and ${number(more)} more` : '') : 'Nothing runs. Ask something in the playground, or send a request.');
  $('slot-table').hidden = !rows.length;
}

let data = null, requests = new Map(), owners = [], now = 0, playing = null, followed = null;
const phase = r => r[4] ? 'again' : r[6] ? 'prefill' : 'decode';
function share(row, s) {                                                                   // a row of a step, with its texts
  const [slot, number, start, n, , samples, , drafts = 0] = row, end = start + n - drafts;
  const r = requests.get(number) || {prompt_tokens: 0}, k = end - r.prompt_tokens, pieces = r.pieces || [];
  const right = drafts && Math.max(0, (s.held[slot] ?? 0) - end), last = drafts && r.finish_reason && r.last_step === s.step;
  const ids = [...(r.prompt_ids || []), ...(r.output_ids || [])].slice(start, end);
  return {slot, number, start, n, phase: phase(row), prompt: r.prompt || '',
          tokens: ids.map(i => data.tokens[i] ?? String(i)), before: pieces.slice(0, Math.max(0, k)).join(''),
          came: samples && k >= 0 ? pieces.slice(k, last ? undefined : k + 1 + right).join('') : ''};
}
const shares = s => [...s.rows].sort((a, b) => (a[3] > 1) - (b[3] > 1) || a[0] - b[0]).map(row => share(row, s));
function stepSlots(i, ps) {                                                                // as those of a server, see `snapshot`
  const s = data.steps[i], phases = new Map(ps.map(p => [p.slot, p.phase]));
  return s.held.flatMap((held, slot) => {
    const number = owners[i][slot], r = requests.get(number) || {prompt_tokens: held, cached_tokens: 0, max_tokens: 0};
    const cached = Math.min(held, r.cached_tokens), out = Math.max(0, held - r.prompt_tokens);
    return held ? [[slot, number, phases.get(slot) ?? 'held', r.prompt_tokens, held, cached, out, r.max_tokens, false, `${number}: `]] : [];
  });
}
const block = (x, y, width, height, color) => el('rect', {x, y, width, height, fill: css(color)});

function packedMask(svg, ps, H) {
  const sx = 1000 / Math.max(1, ps.reduce((a, p) => a + p.start + p.n, 0)), sy = H / Math.max(1, ps.reduce((a, p) => a + p.n, 0));
  let x = 0, y = 0;
  for (const p of ps) {
    const c = p.start * sx, h = Math.max(.8, p.n * sy), wide = p.n > 1 ? p.n * sx : Math.min(Math.max(3, sx), c + sx), k = Math.min(p.n, 48);
    if (c) svg.append(block(x, y, c, h, 'held'));
    let d = `M${x + c + p.n * sx - wide} ${y}`;
    for (let i = 0; i < k; i++) d += `H${x + c + p.n * sx - wide + (i + 1) * wide / k}V${y + (i + 1) * h / k}`;
    svg.append(el('path', {d: d + `H${x + c + p.n * sx - wide}Z`, fill: css(p.phase)}));
    x += c + p.n * sx;
    y += p.n * sy;
  }
}

function paddedMask(svg, ps, [rows, columns], H) {
  const sx = 1000 / Math.max(1, columns), h = H / Math.max(1, rows, ps.length);
  svg.append(block(0, 0, 1000, H, 'padded'));
  ps.forEach((p, i) => {
    const x = Math.max(0, columns - p.start - p.n) * sx;
    svg.append(block(x, i * h, p.start * sx, h * .96, 'held'), block(x + p.start * sx, i * h, Math.max(1, p.n * sx), h * .96, p.phase));
  });
}

function drawMask(s, ps) {
  const H = s.rectangle ? Math.min(260, 12 * Math.max(s.rectangle[0], 1)) : Math.min(260, 24 + 6 * s.tokens), svg = $('mask');
  svg.replaceChildren();
  svg.setAttribute('viewBox', `0 0 1000 ${H}`);
  svg.style.height = `${H}px`;
  s.rectangle ? paddedMask(svg, ps, s.rectangle, H) : packedMask(svg, ps, H);
}

const counted = s => ['useful', 'padded', 'masked', 'recomputed', 'rejected', 'reused'].filter(k => s[k] || k === 'useful')
  .map(k => `${number(s[k])} ${k}`).join(', ');
const lineOf = s => `step ${s.step} of ${data.steps.at(-1).step}: ${many(s.tokens, 'token')} for ${many(s.rows.length, 'request')} `
  + `(${counted(s)}), ${s.waiting} waiting`;
function box(p, total) {
  const texts = p.tokens.length && total <= 600 ? p.tokens.map(t => el('code', {}, seen(t))) : [`${p.n} tokens`];
  const e = el('span', {class: 'part', title: `request ${p.number}, slot ${p.slot}, ${p.phase}, positions ${p.start} to ${p.start + p.n - 1}`},
    el('b', {}, p.number), ...texts);
  e.style.borderColor = e.firstChild.style.background = css(p.phase);
  return e;
}
const answer = p => el('div', {class: 'answer'}, el('b', {}, p.number), ' ', el('span', {class: 'chip'}, `${p.phase} in slot ${p.slot}`), ' ',
  el('span', {class: 'dim'}, p.prompt.slice(-160)), p.before.slice(-600), el('mark', {}, p.came));
function drawRun() {                                                                       // all steps, and the numbers of requests where there is room
  const [g, lanes] = drawRoll(Infinity, true, (i, slot) => followed !== null && data.roll[i].owner[slot] !== followed);
  const x = i => place.begin + place.span * i / steps.length;
  g.textAlign = 'left';
  g.fillStyle = tones.on;
  for (let slot = 0; slot < lanes && place.lane > 10; slot++)
    for (let i = 0, end; i < steps.length; i = end) {
      const owner = data.roll[i].owner[slot];
      for (end = i + 1; end < steps.length && data.roll[end].owner[slot] === owner;) end++;
      if (owner !== undefined && x(end) - x(i) > 7 * String(owner).length + 5) g.fillText(owner, x(i) + 3, (slot + 1) * place.lane - 4);
    }
  frame();
}
function frame() {
  const mark = $('now').style, wide = place.span / steps.length;
  mark.left = `${place.begin + now * wide - 1}px`;
  mark.width = `${Math.max(3, wide + 2)}px`;
}
function go(i) {
  now = Math.max(0, Math.min(i, steps.length - 1));
  const s = data.steps[now], ps = shares(s);
  $('slider').value = $('place').value = now;
  $('slider').setAttribute('aria-valuetext', lineOf(s));
  put($('line'), lineOf(s) + (s.error ? `, broke off with ${s.error}` : ''));
  put($('times'), ['schedule', 'forward', 'sample', 'text'].map(k => `${k} ${(s[k] * 1000).toFixed(1)} ms`).join(', '));
  $('row').replaceChildren(...ps.map(p => box(p, s.tokens)));
  put($('what'), s.rectangle ? `Padded batch, ${s.rectangle.join(' × ')}` : 'Mask of the packed row');
  drawMask(s, ps);
  showSlots({slots: stepSlots(now, ps)});
  const first = ps.filter(p => p.number === followed), rest = ps.filter(p => p.number !== followed);
  $('texts').replaceChildren(...[...first, ...rest].slice(0, 40).map(answer), ps.length > 40 ? `and ${ps.length - 40} more` : '');
  frame();
  if (location.protocol !== 'about:') history.replaceState(null, '', '#step=' + s.step);
}
function play(on) {
  clearInterval(playing);
  playing = on ? setInterval(() => now < steps.length - 1 ? go(now + 1) : play(false), 1000 / $('pace').value) : null;
  put($('run'), on ? 'Pause' : 'Play');
}
function follow(number, at) {
  followed = number === followed && at === undefined ? null : number;
  drawRun();
  if (at !== undefined && at !== null) go(data.steps.findIndex(s => s.step >= at));
}

const moves = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9};
function pressed(e) {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches('input[type=number], select')) return;
  if (e.key === ' ' && !e.target.matches('button, summary')) play(!playing);
  else if (e.key === 'Escape') follow(followed);
  else if (e.key in moves) go(now + moves[e.key] * (e.shiftKey ? 10 : 1));
  else return;
  e.preventDefault();
}
function underPointer(e) {                                                                 // the step and the slot
  const {left, top} = $('roll').getBoundingClientRect();
  return [Math.floor((e.clientX - left - place.begin) / place.span * steps.length), Math.floor((e.clientY - top) / place.lane)];
}
function hint(e) {
  const [i, slot] = underPointer(e), letter = steps[i]?.[0][slot]?.toLowerCase();
  $('roll').title = letter in KINDS ? `slot ${slot}, step ${data.steps[i].step}: ${[data.roll[i].owner[slot] ?? []].flat().map(n => `request ${n}, `)}${KINDS[letter]}` : '';
}
const cell = (x, num) => el('td', num ? {class: 'num'} : {}, x ?? '');
const listed = r => el('tr', {}, el('td', {}, el('button', {title: 'show where it is, and go to its first step',
  onclick: () => follow(r.request, r.first_step)}, r.request)), cell(r.finish_reason ?? 'still there'), cell(r.prompt_tokens, 1),
  cell(r.cached_tokens, 1), cell(r.output_tokens, 1), cell(r.first_step, 1), cell(r.last_step, 1), cell((r.error || r.prompt || '').slice(0, 160)));
function readOwners() {                                                                    // whose each slot is, in each step
  const before = {};
  return data.steps.map((s, i) => {
    const mine = before[s.engine] = [...(before[s.engine] || [])];
    for (const [number, slot] of s.admitted) mine[slot] = number;
    for (const [slot, number] of s.rows) mine[slot] = number;
    data.roll[i].owner = [];
    mine.forEach((number, slot) => { if (s.held[slot]) data.roll[i].owner[data.roll[i][4] + slot] = number; });
    return mine;
  });
}
function startTrace(element) {
  data = JSON.parse(element.textContent);
  steps = data.roll;
  requests = new Map(data.requests.map(r => [r.request, r]));
  owners = readOwners();
  put($('state'), [data.model, data.strategy, data.dtype, `${data.totals.steps} steps`, `${data.requests.length} requests`,
    `${number(data.totals.output_tokens)} tokens out`].filter(Boolean).join(' · '));
  $('slider').max = $('place').max = steps.length - 1;
  $('all').append(...data.requests.map(listed));
  document.addEventListener('keydown', pressed);
  for (const [id, by] of [['back', -1], ['on', 1], ['first', -1e9], ['last', 1e9]]) $(id).onclick = () => go(now + by);
  $('slider').oninput = () => go(+$('slider').value);
  $('place').onchange = () => go(+$('place').value);
  $('run').onclick = () => play(!playing);
  $('pace').onchange = () => play(!!playing);
  $('roll').onclick = e => go(underPointer(e)[0]);
  $('roll').onmousemove = hint;
  redraw = drawRun;
  drawRun();
  const asked = /^#step=(\d+)$/.exec(location.hash)?.[1] ?? element.dataset.step;
  go(Math.max(0, data.steps.findIndex(s => s.step === +asked)));
}

function drawSpeed(points) {                                                               // tokens a second over the last minute
  const [g, wide] = sharp($('speed'), 34), most = Math.max(1, ...points), x = k => wide * (k + 1 - points.length + 240) / 240;
  g.beginPath();
  g.moveTo(x(0), 34);
  points.forEach((p, k) => g.lineTo(x(k), 33 - 30 * p / most));
  g.lineTo(x(points.length - 1), 34);
  g.globalAlpha = .25;
  g.fillStyle = tones.decode;
  g.fill();
  g.globalAlpha = 1;
  g.beginPath();
  points.forEach((p, k) => g.lineTo(x(k), 33 - 30 * p / most));
  g.strokeStyle = tones.decode;
  g.lineWidth = 1.5;
  g.stroke();
}
let shots = [], speeds = [], last = null, drawn = 0, named = 0;
function rate(name) {                                                                      // a second, over the last three
  const a = shots[0], b = shots.at(-1);
  return b.running && b.t > a.t ? Math.max(0, b[name] - a[name]) / (b.t - a.t) : 0;
}
const percent = (a, b) => b ? `${number(100 * a / b, a && a < b / 10 ? 1 : 0)}%` : '–';
const partsOf = (s, names) => names.map(k => `${k} ${number(1000 * s.parts[k] / Math.max(1, s.parts.steps), 1)} ms`).join(', ');

function showFigures(s) {
  const speed = rate('made'), t = s.totals;
  speeds = [...speeds, speed].slice(-240);
  put($('model'), s.model);
  put($('f-running'), number(s.running));
  put($('n-running'), `of ${many(s.seats, 'slot')}`);
  put($('f-waiting'), number(s.waiting));
  put($('n-waiting'), s.waiting ? 'for a slot or memory' : 'nobody');
  put($('f-speed'), number(speed, speed < 10 ? 1 : 0));
  put($('n-speed'), `and ${number(rate('read'))} of prompts`);
  put($('f-kv'), s.kv.total ? percent(s.kv.held, s.kv.total) : number(s.kv.held));
  put($('n-kv'), `${number(s.kv.held)} of ${many(s.kv.total, 'block')}, ${number(s.kv.cached)} cached`);
  $('b-kv').style.width = `${100 * s.kv.held / Math.max(1, s.kv.total)}%`;
  put($('f-hits'), percent(t.cached, t.prompt));
  put($('n-hits'), `${number(t.cached)} of ${number(t.prompt)} prompt tokens`);
  $('b-hits').style.width = `${100 * t.cached / Math.max(1, t.prompt)}%`;
  put($('f-streams'), number(s.streams));
  put($('n-streams'), `${number(s.pending)} of ${number(s.most)} answers under way`);
  put($('f-step'), s.parts.steps ? `${number(1000 * s.parts.all / s.parts.steps, 1)} ms` : '–');
  put($('n-step'), s.parts.steps ? `${percent(s.parts.forward, s.parts.all)} of it in the model` : 'no step yet');
  $('step').title = s.parts.steps ? partsOf(s, ['schedule', 'forward', 'sample', 'text']) : '';
  const ended = Object.entries(t.ended).map(([why, n]) => `${number(n)} ${why}`).join(', ');
  put($('f-done'), number(Object.values(t.ended).reduce((a, b) => a + b, 0)));
  put($('n-done'), `${ended || 'none yet'}${t.preempted ? `; ${many(t.preempted, 'preemption')}` : ''}`);
}

function showQueue(s) {
  const online = s.waiting - s.behind, chips = $('chips'), next = s.waiting ? s.queue : [];
  put($('queue'), s.waiting ? `${number(online)} online, ${number(s.behind)} of batches. The next, by the tokens of their prompts:` : 'Nobody waits.');
  while (chips.children.length > next.length) chips.lastChild.remove();
  while (chips.children.length < next.length) chips.append(el('li', {class: 'chip'}));
  next.forEach(([id, prompt, batch], k) => {
    put(chips.children[k], number(prompt));
    chips.children[k].classList.toggle('batch', batch);
    chips.children[k].title = `request ${id}${batch ? ', of a batch' : ''}`;
  });
}

function take(text) {
  const s = JSON.parse(text);
  for (const step of s.steps) steps.push(step);
  steps = steps.slice(-480);
  shots = [...shots.filter(x => x.t > s.t - 3), s];
  last = s;
  if (calm.matches && performance.now() - drawn < 2000) return;                            // fewer changes for who asked for few
  drawn = performance.now();
  paint();
}
function paint() {
  if (!last) return;
  showFigures(last);
  showSlots(last);
  showQueue(last);
  drawRoll(last.seats);
  drawSpeed(speeds);
  if (performance.now() - named > 5000 || !named) {
    named = performance.now();
    $('roll').setAttribute('aria-label', `The last ${number(steps.length)} steps: ${number(last.running)} of ${many(last.seats, 'slot')} in use, `
      + `${number(last.waiting)} waiting, ${number(rate('made'))} tokens a second. The table below has each slot.`);
  }
}

let key = kept('batchlab-key');
const call = (path, options = {}) => fetch(path, {...options, cache: 'no-store', credentials: 'omit', headers: {...options.headers, ...(key && {Authorization: `Bearer ${key}`})}});
async function failure(response) {
  try { return (await response.json()).error.message; } catch { return `the server answered with status ${response.status}`; }
}
async function events(response, take) {                                                    // reads a stream of server-sent events
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = '';;) {
    const {value, done} = await reader.read();
    if (done) return;
    const whole = (text + value).split('\n\n');
    text = whole.pop();
    for (const e of whole) if (e.startsWith('data: ')) take(e.slice(6));
  }
}
let feed = null, paused = false, tries = 0, again = null;
const say = text => put($('state'), text);
function stop() {
  clearTimeout(again);
  feed?.abort();
  feed = null;
}
function askKey(wrong) {
  stop();
  document.body.classList.add('locked');
  put($('wrong'), wrong ? 'This key is not the one that the server has.' : '');
  say('The server wants an API key.');
  $('key').focus();
}
async function watch() {
  stop();
  if (paused || document.hidden) return;                                                   // who does not look costs nothing
  const mine = feed = new AbortController();
  try {
    const r = await call('/page/events', {signal: mine.signal});
    if (r.status === 401) return askKey(key);
    if (!r.ok) throw Error(await failure(r));
    document.body.classList.remove('locked');
    $('forget').hidden = !key;
    [steps, shots, last] = [[], [], null];
    tries = 0;
    say('Live');
    listBatches();
    await events(r, take);
    throw Error('The server has closed the connection');
  } catch (e) {
    if (mine.signal.aborted) return;
    say(`${e.message === 'Failed to fetch' || e.name === 'TypeError' ? 'The server can not be reached' : e.message}: trying again.`);
    again = setTimeout(watch, Math.min(10000, 1000 * 2 ** tries++));
  }
}

let names = new Map(), due = null;
async function fileLink(e) {                                                               // a link sends no key
  if (!key) return;
  e.preventDefault();
  const link = e.currentTarget, r = await call(link.getAttribute('href'));
  if (!r.ok) return say(await failure(r));
  const url = URL.createObjectURL(await r.blob());
  el('a', {href: url, download: link.download}).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}
function outcome(c, name) {                                                                  // what was answered, and what failed
  const bar = el('span', {class: 'bar', role: 'progressbar', 'aria-valuenow': c.completed + c.failed, 'aria-valuemax': c.total,
    'aria-label': `done of ${name}, ${number(c.failed)} failed`}, el('i'), el('i'));
  [['completed', 'decode'], ['failed', 'failed']].forEach(([k, tone], i) => {
    bar.children[i].style.width = `${100 * c[k] / Math.max(1, c.total)}%`;
    bar.children[i].style.background = `var(--${tone})`;
  });
  return bar;
}
function batchRow(b) {
  const c = b.request_counts || {total: 0, completed: 0, failed: 0}, done = c.completed + c.failed, name = names.get(b.input_file_id) || b.input_file_id;
  const link = (id, label) => id ? [el('a', {href: `/v1/files/${encodeURIComponent(id)}/content`, download: `${id}.jsonl`, onclick: fileLink,
    'aria-label': `${label} of ${name}`}, label), ' '] : [];
  const failed = c.failed ? `, ${number(c.failed)} failed` : '';
  return el('li', {}, el('span', {class: 'name'}, name), el('span', {class: 'chip'}, b.status.replace('_', ' ')),
    el('span', {class: 'when'}, [...Object.values(b.metadata || {}), new Date(b.created_at * 1000).toLocaleString(), b.id].join(', ')),
    outcome(c, name),
    el('span', {class: 'num'}, `${number(done)} of ${number(c.total)}${failed}`), el('span', {}, ...link(b.output_file_id, 'answers'), ...link(b.error_file_id, 'errors')));
}
async function listBatches() {
  clearTimeout(due);
  if (!feed || !last?.batches) {
    put($('no-batches'), last ? 'The server keeps no files: start it with --data FOLDER.' : '');
    if (feed) due = setTimeout(listBatches, 500);
    return;
  }
  try {
    const r = await call('/v1/batches?limit=8');
    if (!r.ok) throw Error(await failure(r));
    const {data, has_more} = await r.json();
    if (data.some(b => !names.has(b.input_file_id))) {
      const files = await (await call('/v1/files?limit=1000&purpose=batch')).json();
      names = new Map([...data.map(b => [b.input_file_id, '']), ...(files.data || []).map(f => [f.id, f.filename])]);
    }
    const made = data.map(batchRow), list = $('batches');
    if (made.map(x => x.outerHTML).join() !== [...list.children].map(x => x.outerHTML).join() && !list.contains(document.activeElement)) list.replaceChildren(...made);
    put($('no-batches'), data.length ? (has_more ? 'The newest 8.' : '') : 'No batch yet.');
  } catch (e) { put($('no-batches'), e.message); }
  due = setTimeout(listBatches, 2000);
}

let talk = [], asking = null;
const turn = (who, text) => {
  const said = el('p', {class: who}, el('b', {}, who === 'user' ? 'You' : 'Model'), el('span', {}, text));
  $('talk').append(said);
  $('talk').scrollTop = $('talk').scrollHeight;
  return said.lastChild;
};
function busy(on) {
  $('send').disabled = on;
  $('stop').disabled = !on;
}
function usageLine(usage, seconds, first, chunks) {
  if (!usage) return `stopped after ${number(seconds, 1)} s and ${many(chunks, 'part')}`;
  const cached = usage.prompt_tokens_details?.cached_tokens, out = usage.completion_tokens;
  return `${many(usage.prompt_tokens, 'token')} in${cached ? ` (${number(cached)} cached)` : ''}, ${number(out)} out, ${number(seconds, 2)} s, `
    + `the first after ${number(first, 2)} s, ${number(out / Math.max(seconds, .001), 1)} tokens/s`;
}
async function send() {
  const text = $('say').value.trim();
  if (!text || asking) return;
  const mine = asking = new AbortController(), begin = performance.now(), since = () => (performance.now() - begin) / 1000;
  let usage = null, first = 0, chunks = 0, said = '', reason = null, wrong = '';
  $('say').value = '';
  turn('user', text);
  talk.push({role: 'user', content: text});
  const answer = turn('model', '');
  busy(true);
  put($('said'), 'Answering …');
  try {
    const body = {messages: talk, stream: true, stream_options: {include_usage: true}, max_tokens: +$('max').value, temperature: +$('warm').value};
    const r = await call('/v1/chat/completions', {method: 'POST', body: JSON.stringify(body), headers: {'Content-Type': 'application/json'}, signal: mine.signal});
    if (!r.ok) throw Error(await failure(r));
    await events(r, data => {
      if (data === '[DONE]') return;
      const e = JSON.parse(data), choice = e.choices?.[0];
      if (e.error) throw Error(e.error.message);
      if (choice?.delta?.content) {
        first ||= since();
        chunks++;
        said += choice.delta.content;
        const log = $('talk'), below = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
        answer.textContent = said;
        if (below) log.scrollTop = log.scrollHeight;                                       // unless somebody reads further up
      }
      reason = choice?.finish_reason || reason;
      usage = e.usage || usage;
    });
  } catch (e) { if (!mine.signal.aborted) wrong = e.message; }
  if (wrong && !said) talk.pop(), answer.parentNode.remove();
  else talk.push({role: 'assistant', content: said});
  put($('said'), wrong ? `Failed: ${wrong}` : `Done${reason === 'length' ? ' (max tokens)' : ''}: ${usageLine(usage, since(), first, chunks)}`);
  asking = null;
  busy(false);
}

function startLive() {
  document.addEventListener('visibilitychange', () => document.hidden ? stop() : watch());
  $('pause').onclick = () => {
    paused = !paused;
    put($('pause'), paused ? 'Go on' : 'Pause');
    paused ? (stop(), say('Paused')) : watch();
  };
  $('ask').onsubmit = e => {
    e.preventDefault();
    key = $('key').value.trim();
    keep('batchlab-key', key);
    $('key').value = '';
    watch();
  };
  $('forget').onclick = () => {
    key = '';
    keep('batchlab-key', '');
    askKey(false);
  };
  $('play').onsubmit = e => { e.preventDefault(); send(); };
  $('say').onkeydown = e => { if (e.key === 'Enter' && !e.shiftKey && !e.isComposing) { e.preventDefault(); send(); } };
  $('stop').onclick = () => { asking?.abort(); $('say').focus(); };
  $('anew').onclick = () => {
    asking?.abort();
    talk = [];
    $('talk').replaceChildren();
    put($('said'), '');
    $('say').focus();
  };
  redraw = paint;
  busy(false);
  watch();
}
let shown = kept('batchlab-scheme');
try { shown = {true: 'light', false: 'dark'}[parent.document.body.dataset.jpThemeLight] || shown; } catch { /* framed by another site */ }
scheme(shown);                                                                             // as JupyterLab is, in a notebook
const recorded = $('trace');
recorded ? startTrace(recorded) : startLive();
