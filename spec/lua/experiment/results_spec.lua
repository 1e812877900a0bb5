local ffi = require "ffi"
local harness = require "spec.lua.experiment.experiment_support"
local json = require "kvlab.json"
local library = require "kvlab.library"
local files = require "kvlab.files"
local results = require "kvlab.experiment.results"

local assert_has, lines, path = harness.assert_has, harness.lines, harness.path
local problem_of, read, run = harness.problem_of, harness.read, harness.run

ffi.cdef [[
int fork(void);
int getpid(void);
int kill(int pid, int signal);
int waitpid(int pid, int *status, int options);
]]

describe("results", function()
  before_each(harness.make_folder)

  it("keep every digit; NaN is null and reads as NaN", function()
    local spec = { run = function()
      return { sum = 0.1 + 0.2, nan = 0 / 0, inf = math.huge, n = 2LL ^ 40, word = "é\"" }
    end }
    local first = run(spec).rows[1].metrics
    assert.equal('{"inf": null, "n": 1099511627776, "nan": null, '
      .. '"sum": 0.30000000000000004, "word": "é\\""}',
      lines()[1]:match '"metrics": (.*), "made_by"')
    local again = run(spec).rows[1].metrics
    for _, metrics in ipairs { first, again } do
      assert.equal(0.1 + 0.2, metrics.sum)
      assert.is_true(metrics.nan ~= metrics.nan and metrics.inf ~= metrics.inf)
    end
  end)

  it("are not computed twice", function()
    run(nil, { context = 512 })
    run()
    assert.same({ "1024 quest 0.1", "1024 quest 0.3", "1024 random 0.1",
      "1024 random 0.3" }, harness.calls)
    assert_has("resumed 4 of 8\n", harness.printed)
    local before = read "results.jsonl"
    local answer = run()
    assert.same({}, harness.calls)
    assert_has("resumed 8 of 8\n", harness.printed)
    assert.equal(before, read "results.jsonl")
    assert.equal(8, #answer.rows)
    run(nil, { prompts = 9 })
    assert.equal(8, #harness.calls)
    assert.equal(16, #lines())
  end)

  it("lose a torn last row and nothing else, wherever it is torn", function()
    run(nil, { context = 512 })
    local whole = read "results.jsonl"
    local last = lines()[4]
    for length = 1, #last, 37 do
      files.write(path "results.jsonl", whole .. last:sub(1, length))
      run(nil, { context = 512 })
      assert.equal(whole, read "results.jsonl")
      assert.same({}, harness.calls)
      assert_has("dropped the last row", harness.printed)
    end
    files.write(path "results.jsonl", whole:sub(1, -2)) -- only the newline is lost
    run(nil, { context = 512 })
    assert.equal(1, #harness.calls)
    assert.equal(whole, read "results.jsonl")
  end)

  it("with damage in the middle are refused with the line", function()
    run()
    local list = lines()
    list[3] = list[3]:sub(1, 20)
    files.write(path "results.jsonl", table.concat(list, "\n") .. "\n")
    assert_has("results.jsonl, line 3 is damaged", problem_of())
    list[3] = "{}"
    files.write(path "results.jsonl", table.concat(list, "\n") .. "\n")
    assert_has("line 3 is damaged (no config and metrics)", problem_of())
  end)

  it("that give a configuration two rows are refused with both lines", function()
    run()
    local list = lines()
    list[9] = list[3]:gsub('"step_us": 3', '"step_us": 4')
    files.write(path "results.jsonl", table.concat(list, "\n") .. "\n")
    assert_has("results.jsonl, lines 3 and 9 are different rows of the same"
      .. " configuration: remove one of them, or start again with --set fresh=true",
      problem_of())
    assert.error_matches(function() results.read(harness.folder) end, "lines 3 and 9")
  end)

  it("count once where a row is there twice, which the run says", function()
    run()
    local whole, list = read "results.jsonl", lines()
    list[9], list[10] = list[3], list[8]
    files.write(path "results.jsonl", table.concat(list, "\n") .. "\n")
    local rows, _, repeated = results.read(harness.folder)
    assert.same({ 8, 2 }, { #rows, repeated })
    run()
    assert_has("dropped 2 rows that were there twice\n", harness.printed)
    assert.same({}, harness.calls)
    assert.equal(whole, read "results.jsonl")
  end)

  it("are there after a kill -9, whole rows only", function()
    local function steps(act)
      return { whole = {
        name = "spec", environment = { device = "cpu" },
        grid = { { "i", { 1, 2, 3, 4 } } },
        run = function(config)
          act(config.i)
          return { x = config.i }
        end,
      } }
    end
    local child = ffi.C.fork()
    if child == 0 then
      pcall(run, steps(function(i)
        if i == 3 then ffi.C.kill(ffi.C.getpid(), 9) end
      end))
      ffi.C.kill(ffi.C.getpid(), 9)
    end
    ffi.C.waitpid(child, nil, 0)
    assert.equal(2, #lines())
    local ran = {}
    run(steps(function(i) ran[#ran + 1] = i end))
    assert.same({ 3, 4 }, ran)
    assert.equal(4, #lines())
  end)

  it("of another experiment, seed or device are refused, --set fresh=true replaces them",
    function()
      run()
      local before = read "results.jsonl"
      assert_has("holds results of seed 0, this run has 1", problem_of(nil, nil,
        { seed = 1 }))
      assert_has("choose another --out=DIR", problem_of(nil, nil, { seed = 1 }))
      assert_has("of name spec, this run has other", problem_of { name = "other" })
      assert_has("of device cpu, this run has cuda:0",
        problem_of { environment = { device = "cuda:0" } })
      assert_has("of description a spec, this run has a GPU",
        problem_of { environment = { device = "cpu", description = "a GPU" } })
      assert.equal(before, read "results.jsonl")
      run(nil, { fresh = true, context = 512 }, { seed = 1 })
      assert.equal(4, #lines())
      assert.equal(1, json.decode(read "manifest.json").seed)
    end)

  it("are in the grid's order in the end, whatever order they came in", function()
    run(nil, { context = 1024 })
    local one = read "results.jsonl"
    run(nil, { context = 512, prompts = 2 }) -- not of the grid
    local other = lines()[5]
    run(nil, { context = "512,1024" })
    local list = lines()
    assert.equal(one, table.concat(list, "\n", 9, 12) .. "\n")
    assert.equal(other, list[5])
    local before = read "results.jsonl"
    run()
    assert.same({}, harness.calls)
    assert.equal(before, read "results.jsonl")
    run(nil, { fresh = true })
    assert.same({ list[1], list[2], list[3], list[4], list[9], list[10], list[11],
                  list[12] }, lines())
  end)

  it("are written by one process at a time", function()
    local problem
    run { run = function()
      problem = problem or select(2, pcall(results.open, harness.folder, false))
      return { x = 1 }
    end }
    assert_has("is being written by another process", problem)
  end)
end)

describe("results.summarise", function()
  local function row(policy, seed, metrics)
    return { config = { policy = policy, seed = seed }, metrics = metrics }
  end

  it("makes one row of the repeats, with the mean and its interval", function()
    local rows = results.summarise {
      row("quest", 0, { x = 1, exact = true }), row("full", 0, { x = 7 }),
      row("quest", 5, { x = 2, exact = true }), row("quest", 9, { x = 6, exact = true }),
    }
    assert.same({ { policy = "quest" }, { policy = "full" } },
      { rows[1].config, rows[2].config })
    assert.same({ x = 3, exact = true }, rows[1].metrics)
    assert.equal(3, rows[1].repeats)
    local half = 4.30265273 * math.sqrt(7) / math.sqrt(3) -- t(2, 0.95)
    assert.is_true(math.abs(rows[1].high.x - 3 - half) < 1e-6)
    assert.is_true(math.abs(rows[1].low.x - 3 + half) < 1e-6)
    assert.is_nil(rows[1].low.exact)
    assert.same({ config = { policy = "full" }, metrics = { x = 7 }, low = {},
                  high = {}, repeats = 1 }, rows[2])
  end)

  it("knows shares of right answers as well as their number allows", function()
    local proportions = { "bytes", right = "questions" }
    local function summary(values, questions)
      local rows = {}
      for i, value in ipairs(values) do
        rows[i] = row("a", i, { right = value, bytes = value })
        rows[i].trials = questions and { right = questions }
      end
      return results.summarise(rows, proportions)[1]
    end
    local one = summary({ 1, 1, 1, 1, 1 }, 128)
    assert.is_true(math.abs(one.low.right - 0.025 ^ (1 / 640)) < 1e-9) -- exact
    assert.same({ 1, 1, 1 }, { one.high.right, one.low.bytes, one.high.bytes })
    one = summary { 1, 1, 1, 1, 1 } -- of how many is not known: one for each at least
    assert.is_true(math.abs(one.low.right - 0.025 ^ (1 / 5)) < 1e-9)
    one = summary({ 0.9, 0.95, 1 }, 128)
    assert.equal(1, one.high.bytes) -- cut off
    assert.is_true(one.high.right < 1)
    one = summary({ 0.9, 0 / 0, 1 }, 128)
    assert.is_true(one.metrics.right ~= one.metrics.right and one.low.right == nil)
    assert.is_true(one.metrics.bytes ~= one.metrics.bytes and one.low.bytes == nil)
    assert_has("proportions has 7 for right", problem_of { proportions = { right = 7 } })
  end)

  it("keep the number of trials, and what each text gave, beside the metrics", function()
    harness.make_folder()
    local lists = { accuracy = { 1, 0, 0 / 0 } }
    run { proportions = { "other", accuracy = "prompts", exact = "step_us" },
          run = function() return { accuracy = 0.5, step_us = 1.5, each = lists } end }
    assert_has('"metrics": {"accuracy": 0.5, "step_us": 1.5}, "each": {"accuracy":'
      .. ' [1, 0, null]}, "trials": {"accuracy": 8}, "made_by"', lines()[1])
    run { proportions = { accuracy = "prompts" }, run = function()
      return { accuracy = 0.5 }
    end }
    assert.equal(8, #lines()) -- and they can be read again
    lists.accuracy = { "x" }
    assert_has("each.accuracy is a table, expected a list, each a number or NaN",
      problem_of({ run = function() return { x = 1, each = lists } end },
        { fresh = true }))
  end)

  it("keeps what is no number only where the repeats agree, and the rows as they are",
    function()
      local rows = { row("a", 0, { exact = true, kernel = "v1" }),
                     row("a", 1, { exact = false, kernel = "v1" }) }
      assert.same({ kernel = "v1" }, results.summarise(rows)[1].metrics)
      assert.equal(0, rows[1].config.seed)
      assert.same({}, results.summarise {})
    end)
end)

describe("manifest", function()
  before_each(harness.make_folder)

  it("says what the results were made with", function()
    run({ environment = { device = "cuda:0", description = "a GPU", driver = "580.1",
      versions = { cuda = "13.0" } } }, { context = "64,32" }, { seed = 5 })
    local m = json.decode(read "manifest.json")
    assert.same({ "spec", "Is it so?", 5, "cuda:0", "a GPU", "580.1", 8, "13.0" }, {
      m.name, m.title, m.seed, m.device, m.description, m.driver, m.configurations,
      m.versions.cuda })
    assert.same({ name = "context", values = { 64, 32 } }, m.axes[1])
    assert.truthy(m.date:match "^%d%d%d%d%-%d%d%-%d%dT%d%d:%d%d:%d%dZ$")
    assert.equal(jit.version, m.versions.luajit)
    assert.equal("string", type(m.command))
  end)

  it("says which kvlab made the results", function()
    run()
    local m = json.decode(read "manifest.json")
    assert.equal(require "kvlab.version", m.version)
    local git = io.popen(("git -C '%s' rev-parse HEAD 2>/dev/null"):format(
      library.paths.root))
    local commit = git:read "*l"
    git:close()
    if commit then assert.equal(commit, m.commit) end
  end)

  local PLOT = { plot = { x = "budget", y = "accuracy", series = "policy",
                          panel = "context" } }

  it("and pictures are those of the run that computed the rows", function()
    run(PLOT)
    local before = {}
    local names = { "manifest.json", "report.html", "accuracy_by_budget.svg" }
    for _, name in ipairs(names) do before[name] = files.read(path(name)) end
    local function assert_kept()
      assert.equal(before["manifest.json"], read "manifest.json")
      for _, name in ipairs(names) do
        assert.is_true(before[name] == files.read(path(name)), name)
      end
    end
    run(PLOT) -- draws the same pictures anew
    assert_kept()
    run(PLOT, { policy = "quest" }, { csv = true })
    assert.same({}, harness.calls)
    assert_kept()
    assert_has("nothing was computed", harness.printed)
    local m = json.decode(read "selection/manifest.json")
    assert.same({ "quest" }, m.axes[2].values)
    assert.equal(4, m.configurations)
    assert.equal(1, #m.earlier_runs)
    assert.equal(json.decode(before["manifest.json"]).date, m.earlier_runs[1].date)
    assert.is_nil(read("selection/report.html"):find("random", 1, true))
    assert.is_nil(read("selection/results.csv"):find("random", 1, true))
    assert_has(path "selection/report.html", harness.printed)
  end)

  it("and pictures are those of a run that computed some of the rows", function()
    run(PLOT, { policy = "quest" })
    run(PLOT)
    local m = json.decode(read "manifest.json")
    assert.same({ 8, { "quest", "random" } }, { m.configurations, m.axes[2].values })
    assert_has("random", read "report.html")
    assert.is_nil(files.read(path "selection/manifest.json"))
  end)

  it("remembers the earlier runs that computed rows", function()
    run(nil, { context = 512 })
    run()
    assert.equal(1, #json.decode(read "manifest.json").earlier_runs)
    run()
    assert.equal(1, #json.decode(read "manifest.json").earlier_runs)
  end)
end)
