--- The verb `compare` compares two folders of results, configuration by configuration.
--
--   kvlab compare A B [--metric=NAME,NAME] [--by=AXIS,AXIS]
--   kvlab compare results/01_recall:policy=quest results/01_recall:policy=random
--
-- A and B are folders or files of rows (.jsonl). Values after a colon choose some of
-- their rows. The verb compares the axes that have one value in all of A and another in
-- all of B (a policy, the device, the seed). Two rows that agree in everything else are
-- a pair. For each metric, the verb takes the pairs where it is a finite number in both
-- rows. It prints how many they are, how many samples they make, the means of A, of B and
-- of B - A over the samples, and the 95 % confidence interval of B - A.
--
-- A sample is a seed, with the mean over all of its pairs, because they share the same
-- random numbers; or a text of a seed, if all rows say what each text gave (`each` of
-- kvlab.experiment). Differences of texts' scores have the interval of
-- statistics.difference, others Student's t. With seeds as samples, there is an interval
-- only with repeats, and only for metrics that the seed changes, or that are shares of
-- right answers. Rows with a note (a budget that sink and recent
-- alone exceed) are left out. All rows of A must have been made by the same versions of
-- the sources, and so must all rows of B. A and B may differ from each other, as they do
-- after an edit; the verb then names the sources that differ.
local hint = require("kvlab.words").hint
local is_finite = require("kvlab.number").is_finite
local json = require "kvlab.json"
local manifests = require "kvlab.experiment.manifest"
local sorted = require "kvlab.sorted"
local results = require "kvlab.experiment.results"
local sources = require "kvlab.sources"
local statistics = require "kvlab.experiment.statistics"
local text_table = require "kvlab.report.table"

local M = {}

local function fail(fmt, ...) error(fmt:format(...), 0) end

-- ---- pairs ----------------------------------------------------------------------------

local MIXED = {} -- a key with several values

--- Returns for each key the value that it has in all rows, or MIXED if the rows differ.
-- A row without the key counts as json.null.
local function constants(rows, keys)
  local values = {}
  for key in pairs(keys) do
    for _, row in ipairs(rows) do
      local value = row.config[key]
      if value == nil then value = json.null end
      if values[key] == nil then
        values[key] = value
      elseif values[key] ~= value then
        values[key] = MIXED
      end
    end
  end
  return values
end

--- Lists the keys that have one value in all of A and another in all of B, as
-- { key =, a =, b = }.
local function find_differences(rows_a, rows_b)
  local keys = {}
  for _, rows in ipairs { rows_a, rows_b } do
    for _, row in ipairs(rows) do
      for key in pairs(row.config) do keys[key] = true end
    end
  end
  local of_a, of_b = constants(rows_a, keys), constants(rows_b, keys)
  local list = {}
  for _, key in ipairs(sorted.keys(keys)) do
    local a, b = of_a[key], of_b[key]
    if a ~= b and a ~= MIXED and b ~= MIXED then
      list[#list + 1] = { key = key, a = a, b = b }
    end
  end
  return list
end

local function key_without(config, differences)
  local rest = {}
  for key, value in pairs(config) do rest[key] = value end
  for _, difference in ipairs(differences) do rest[difference.key] = nil end
  return results.key(rest)
end

---@class kvlab.compare.pairs
---@field list {a: table, b: table}[]  rows, in A's order
---@field differences {key: string, a: any, b: any}[]
---@field only_a integer   rows of A without a partner
---@field only_b integer
---@field noted integer    pairs that are left out because a row has a note
---@field note string|nil  one of these notes
---@field seeds integer

--- Pairs the rows of A with those of B.
---@param rows_a table[]
---@param rows_b table[]
---@return kvlab.compare.pairs
function M.pair(rows_a, rows_b)
  local p = { list = {}, differences = find_differences(rows_a, rows_b), only_a = 0,
              noted = 0, seeds = 0 }
  local partner, has_seed = {}, {}
  for _, b in ipairs(rows_b) do partner[key_without(b.config, p.differences)] = b end
  for _, a in ipairs(rows_a) do
    local b = partner[key_without(a.config, p.differences)]
    if b and (text_table.note_of(a) or text_table.note_of(b)) then
      p.noted, p.note = p.noted + 1, text_table.note_of(a) or text_table.note_of(b)
    elseif b then
      p.list[#p.list + 1] = { a = a, b = b }
      local seed = a.config.seed or 0
      if not has_seed[seed] then has_seed[seed], p.seeds = true, p.seeds + 1 end
    else
      p.only_a = p.only_a + 1
    end
  end
  p.only_b = #rows_b - #p.list - p.noted
  return p
end

-- ---- metrics --------------------------------------------------------------------------

local function is_number_in(pair, metric)
  return is_finite(pair.a.metrics[metric]) and is_finite(pair.b.metrics[metric])
end

--- The results of each text in both rows of a pair: two lists; nil unless both rows have
-- results, of the same texts.
local function texts_of(pair, metric)
  local a, b = (pair.a.each or {})[metric], (pair.b.each or {})[metric]
  if type(a) ~= "table" or type(b) ~= "table" or #a ~= #b then return nil end
  for i = 1, #a do
    if not is_finite(a[i]) or not is_finite(b[i]) then return nil end
  end
  return a, b
end

--- The samples of a metric: the mean of A and of B over the pairs of each seed or, if all
-- pairs say what each text gave, of each text of a seed. Returns two lists of them, and
-- whether they are of texts.
local function samples_of(list, metric)
  local of_texts = true
  for _, pair in ipairs(list) do of_texts = of_texts and texts_of(pair, metric) ~= nil end
  local of_a, of_b, counts, at = {}, {}, {}, {}
  local function add(key, a, b)
    local i = at[key] or #counts + 1
    local n = (counts[i] or 0) + 1
    at[key], counts[i] = i, n
    of_a[i] = (of_a[i] or 0) + (a - (of_a[i] or 0)) / n
    of_b[i] = (of_b[i] or 0) + (b - (of_b[i] or 0)) / n
  end
  for _, pair in ipairs(list) do
    local seed = pair.a.config.seed or 0
    local a, b = texts_of(pair, metric)
    for i = 1, of_texts and #a or 0 do add(seed .. " " .. i, a[i], b[i]) end
    if not of_texts then add(seed, pair.a.metrics[metric], pair.b.metrics[metric]) end
  end
  return of_a, of_b, of_texts
end

--- Whether each configuration's metric is the same for every seed, in A and in B. Such
-- seeds are not separate samples.
local function is_fixed(list, metric)
  local first = {}
  for _, pair in ipairs(list) do
    local key = key_without(pair.a.config, { { key = "seed" } })
    local one = first[key] or pair
    if one.a.metrics[metric] ~= pair.a.metrics[metric]
      or one.b.metrics[metric] ~= pair.b.metrics[metric] then
      return false
    end
    first[key] = one
  end
  return true
end

--- The number of 0/1 trials that a metric is a share of: the smallest among the rows of
-- all pairs.
local function trials_of(list, metric)
  local rows = {}
  for _, pair in ipairs(list) do
    rows[#rows + 1], rows[#rows + 2] = pair.a, pair.b
  end
  return results.trials(rows, metric)
end

local function are_shares(values)
  for _, value in ipairs(values) do
    if value < 0 or value > 1 then return false end
  end
  return true
end

--- The mean difference of the samples of B and A, and its interval. Scores of texts,
-- 0 ... 1, have the interval for shares, and other samples Student's t. If all seeds have
-- the same difference, t has no width; a share of 0/1 trials then has the interval for
-- this number of trials, and any other metric that is fixed has none.
local function difference_of(list, metric, of_a, of_b, of_texts)
  local differences, are_equal = {}, true
  for i, b in ipairs(of_b) do
    differences[i] = b - of_a[i]
    are_equal = are_equal and differences[i] == differences[1]
  end
  local trials = not of_texts and are_equal and trials_of(list, metric)
  if trials then return { statistics.difference(differences, trials) } end
  if of_texts and are_shares(of_a) and are_shares(of_b) then
    return { statistics.difference(differences) }
  end
  local mean, low, high = statistics.interval(differences)
  if not of_texts and is_fixed(list, metric) then return { mean } end
  return { mean, low, high }
end

--- Returns the means of A, of B and of B - A over the samples, with the numbers of pairs
-- and samples; nil if the metric is a number in no pair.
local function measure(all, metric)
  local list = {}
  for _, pair in ipairs(all) do
    if is_number_in(pair, metric) then list[#list + 1] = pair end
  end
  if #list == 0 then return nil end
  local of_a, of_b, of_texts = samples_of(list, metric)
  return { metric = metric, pairs = #list, samples = #of_a,
           a = statistics.interval(of_a), b = statistics.interval(of_b),
           difference = difference_of(list, metric, of_a, of_b, of_texts) }
end

--- Returns the sorted names of the metrics that are numbers; and, for metrics that only A
-- or only B has, which of the two has them.
local function metric_names(list)
  local names, of, only = {}, { a = {}, b = {} }, {}
  for _, pair in ipairs(list) do
    for side, has in pairs(of) do
      for name, value in pairs(pair[side].metrics) do
        if type(value) == "number" then names[name], has[name] = true, true end
      end
    end
  end
  for name in pairs(names) do
    only[name] = not of.b[name] and "A" or not of.a[name] and "B" or nil
  end
  return sorted.keys(names), only
end

--- Groups pairs by their values of some axes, in the order in which the values first
-- occur. A group is { words = its values as text, list = its pairs }.
local function group(list, axes)
  local groups, group_of = {}, {}
  for _, pair in ipairs(list) do
    local words = {}
    for i, axis in ipairs(axes) do
      words[i] = text_table.format_cell(pair.a.config[axis])
    end
    local key = table.concat(words, "\0")
    if not group_of[key] then
      group_of[key] = { words = words, list = {} }
      groups[#groups + 1] = group_of[key]
    end
    table.insert(group_of[key].list, pair)
  end
  return groups
end

--- Returns a line for every metric and group of pairs.
---@param p kvlab.compare.pairs
---@param metrics string[]
---@param axes string[]
---@return {words: string[], metric: string, pairs: integer, samples: integer, a: number,
---  b: number, difference: number[]}[]  difference: mean, low, high (the last two only
---  if there are several samples, and they say how much the metric varies)
function M.lines(p, metrics, axes)
  local lines = {}
  for _, metric in ipairs(metrics) do
    for _, g in ipairs(group(p.list, axes)) do
      local line = measure(g.list, metric)
      if line then
        line.words = g.words
        lines[#lines + 1] = line
      end
    end
  end
  return lines
end

-- ---- the verb -------------------------------------------------------------------------

--- "DIR:policy=quest,budget=0.1" -> DIR and { policy = "quest", budget = "0.1" }.
local function split(text)
  local path, filter = text:match "^(.*):([%a_][%w_]*=.*)$"
  local wanted = {}
  for item in (filter or ""):gmatch "[^,]+" do
    local key, value = item:match "^([%w_]+)=(.*)$"
    if not key then fail("%s: %s is not KEY=VALUE", text, item) end
    wanted[key] = value
  end
  return path or text, wanted
end

--- The keys that the configurations of rows have, or the values of one key: sorted texts.
local function texts_of_configs(rows, key)
  local has = {}
  for _, row in ipairs(rows) do
    if key and row.config[key] ~= nil then has[tostring(row.config[key])] = true end
    for name in pairs(key and {} or row.config) do has[name] = true end
  end
  return sorted.keys(has)
end

--- "; did you mean policy? There is budget, policy" of a name that is not there.
local function alternatives(name, known)
  return ("%s There is %s"):format(hint(name, known):gsub("^$", "."),
    table.concat(known, ", "))
end

--- Raises for an axis that no row has, and for a value that no row has on its axis.
local function check_wanted(rows, wanted, path)
  local axes = texts_of_configs(rows)
  for _, key in ipairs(sorted.keys(wanted)) do
    local values = texts_of_configs(rows, key)
    if #values == 0 then
      fail("%s: no row has an axis %s%s", path, key, alternatives(key, axes))
    end
    local is_there = false
    for _, value in ipairs(values) do is_there = is_there or value == wanted[key] end
    if not is_there then
      fail("%s: no row has %s=%s%s", path, key, wanted[key],
        alternatives(wanted[key], values))
    end
  end
end

local function keep(rows, wanted)
  local kept = {}
  for _, row in ipairs(rows) do
    local fits = true
    for key, value in pairs(wanted) do
      fits = fits and tostring(row.config[key]) == value
    end
    if fits then kept[#kept + 1] = row end
  end
  return kept
end

--- Returns the rows that a word of the command line names, and a line that describes
-- them.
local function open(text)
  local path, wanted = split(text)
  local all, _, repeated = results.read(path)
  if #all == 0 then
    fail("%s has no results: compare takes folders, or .jsonl files of rows", path)
  end
  check_wanted(all, wanted, path)
  local rows = keep(all, wanted)
  local mixed = results.mixed(rows)
  if mixed[1] then
    fail("%s: its rows were made by different versions of %s; compute the older ones"
      .. " again, or choose rows by %s:KEY=VALUE", text, table.concat(mixed, ", "), path)
  end
  if #rows == 0 then
    fail("%s: no row has all of these values; the first row has %s", text,
      results.key(all[1].config))
  end
  local manifest = not path:find "%.jsonl$" and manifests.read(path) or {}
  local words = { text, ("%d rows"):format(#rows), manifest.name, manifest.date,
                  manifest.commit and "commit " .. manifest.commit:sub(1, 7) }
  if repeated > 0 then
    words[#words + 1] = ("%d rows are there twice and count once"):format(repeated)
  end
  return rows, table.concat(words, ", ")
end

--- Raises if a given name is not among the known ones.
local function check_names(given, known, what)
  local has = {}
  for _, name in ipairs(known) do has[name] = true end
  for _, name in ipairs(given) do
    if not has[name] then
      fail("%s: nothing is called %s%s", what, name, alternatives(name, known))
    end
  end
end

local function as_table(lines, axes)
  local t = { header = { "metric" }, rows = {} }
  for _, axis in ipairs(axes) do t.header[#t.header + 1] = axis end
  for _, name in ipairs { "pairs", "samples", "A", "B", "B - A", "95 % interval",
                          "differs" } do
    t.header[#t.header + 1] = name
  end
  for i, line in ipairs(lines) do
    local mean, low, high = unpack(line.difference)
    local interval = low and ("%s ... %s"):format(text_table.format_number(low),
      text_table.format_number(high)) or nil
    local differs = low and ((low > 0 or high < 0) and "yes" or "no") or nil
    local row = { line.metric, unpack(line.words) }
    for k, cell in ipairs { line.pairs, line.samples, line.a, line.b, mean } do
      row[1 + #axes + k] = cell
    end
    row[7 + #axes], row[8 + #axes] = interval, differs
    t.rows[i] = row
  end
  return t
end

--- kvlab compare
---@param a string
---@param b string
---@param options kvlab.CommandLine  with metric and by
function M.main(a, b, options)
  local rows_a, words_a = open(a)
  local rows_b, words_b = open(b)
  local p = M.pair(rows_a, rows_b)
  if #p.list == 0 and p.noted > 0 then
    fail("all %d pairs are left out because a row has a note: %s", p.noted, p.note)
  elseif #p.list == 0 then
    fail("A and B have no configuration in common: A begins with %s, B with %s",
      results.key(rows_a[1].config), results.key(rows_b[1].config))
  end
  local metrics, only = metric_names(p.list)
  local axes = options.by or {}
  check_names(options.metric or {}, metrics, "--metric")
  check_names(axes, texts_of_configs(rows_a), "--by")
  io.write("A  ", words_a, "\nB  ", words_b, "\n")
  for _, d in ipairs(p.differences) do
    io.write(("   %s: %s in A, %s in B\n"):format(d.key, tostring(d.a), tostring(d.b)))
  end
  local changed = sources.differences(rows_a[1].made_by or {}, rows_b[1].made_by or {})
  if changed[1] then
    io.write("   made by different versions of: ", table.concat(changed, ", "), "\n")
  end
  local lines = M.lines(p, options.metric or metrics, axes)
  io.write("\n", text_table.text(as_table(lines, axes)), "\n")
  io.write(("%d pairs of %d seeds; %d rows are in A only, %d in B only.\n"):format(
    #p.list, p.seeds, p.only_a, p.only_b))
  if p.noted > 0 then
    io.write(("%d pairs are left out because a row has a note.\n"):format(p.noted))
  end
  for _, metric in ipairs(options.metric or metrics) do
    if only[metric] then
      io.write(("%s is in %s only, so it is not compared.\n"):format(metric,
        only[metric]))
    end
  end
  local has_all = true
  for _, line in ipairs(lines) do has_all = has_all and line.difference[2] ~= nil end
  if p.seeds < 2 and not has_all then
    io.write "One seed gives no interval: run both with --set repeats=N.\n"
  end
  return 0
end

return M
