local harness = require "spec.lua.experiment.experiment_support"
local json = require "kvlab.json"
local plot = require "kvlab.report.plot"
local experiment = require "kvlab.experiment.experiment"

local HERE = "experiment_support.lua" -- the script that calls experiment.run
local assert_has, lines, path = harness.assert_has, harness.lines, harness.path
local problem_of, read, run = harness.problem_of, harness.read, harness.run

describe("experiment", function()
  before_each(harness.make_folder)

  describe("grid", function()
    it("runs in the order of the axes, the last one fastest", function()
      run()
      assert.same({ "512 quest 0.1", "512 quest 0.3", "512 random 0.1", "512 random 0.3",
        "1024 quest 0.1", "1024 quest 0.3", "1024 random 0.1", "1024 random 0.3" },
        harness.calls)
    end)

    it("leaves out what `when` does not want", function()
      run { when = function(c) return c.policy ~= "random" or c.budget == 0.3 end }
      assert.equal(6, #harness.calls)
      assert_has("`when` leaves no configuration",
        problem_of { when = function() return false end })
    end)

    it("refuses what `check` refuses before anything runs", function()
      local words = problem_of { check = function(c)
        if c.budget == 0.3 then error("the budget is too large", 2) end
      end }
      assert_has("the budget is too large\n  configuration context=512 policy=quest "
        .. "budget=0.3", words)
      assert.same({}, harness.calls)
    end)

    it("passes axes, defaults, device and seed to run, and writes just these", function()
      local seen
      run({ run = function(config, settings)
        seen = seen or { prompts = settings.prompts, n = #settings.configs }
        config.prompts = "changed"
        return { x = 1 }
      end }, { context = 512 }, { seed = 7 })
      assert.equal(8, seen.prompts)
      assert.equal(4, seen.n)
      assert.equal('{"config": {"context": 512, "policy": "quest", '
        .. '"budget": 0.10000000000000001, "exact": true, "model": "small", '
        .. '"prompts": 8, "device": "cpu", "seed": 7}, "metrics": {"x": 1}',
        lines()[1]:match '^(.*), "made_by": {.*}}$')
    end)

    it("refuses a grid without an order, doubles, and clashes", function()
      assert_has("without an order", problem_of { grid = { policy = { "a" } } })
      assert_has("has 1 twice", problem_of { grid = { { "a", { 1, 1 } } } })
      assert_has("empty list", problem_of { grid = { { "a", {} } } })
      assert_has("prompts is defined twice",
        problem_of { grid = { { "prompts", { 1 } } } })
      assert_has("cannot be named seed", problem_of { grid = { { "seed", { 1 } } } })
      assert_has("is nan", problem_of { grid = { { "a", { 0 / 0 } } } })
      assert_has("value of axis a is a table", problem_of { grid = { { "a", { {} } } } })
    end)
  end)

  describe("overrides", function()
    it("put one value or a list in the place of an axis", function()
      run(nil, { context = "2048,4096", policy = "random", budget = 0.5 })
      assert.same({ "2048 random 0.5", "4096 random 0.5" }, harness.calls)
    end)

    it("put a value in the place of a default", function()
      local rows = run(nil, { prompts = 2, exact = "false", model = "a,b" }).rows
      assert.equal(2, rows[1].config.prompts)
      assert.is_false(rows[1].config.exact)
      assert.equal("a,b", rows[1].config.model)
      assert.equal(0.2, rows[1].metrics.accuracy)
    end)

    it("keep the type of what was there", function()
      assert.equal("7", run(nil, { model = 7 }).rows[1].config.model)
      assert_has('--set context is "big", expected a number', problem_of(nil,
        { context = "512,big" }))
      assert_has('--set context is "", expected a number', problem_of(nil,
        { context = "512," }))
      assert_has("--set exact is 3, expected a boolean", problem_of(nil, { exact = 3 }))
      assert_has("a list is for an axis", problem_of(nil, { prompts = "1,2" }))
      assert_has("expected a number", problem_of(nil, { budget = "0.1,nan" }))
      assert_has("expected a number", problem_of(nil, { budget = "0.1,0x1" }))
      assert_has("expected a finite number", problem_of(nil, { budget = "1e999" }))
      assert_has("has 512 twice", problem_of(nil, { context = "512,512" }))
    end)

    it("name the nearest of the known names", function()
      local problem = problem_of(nil, { contxt = 1 })
      assert.equal(1, problem:find("--set: nothing is called contxt; did you mean "
        .. "context?", 1, true), problem)
      assert_has("There is context, policy, budget, exact, model, prompts", problem)
      assert_has("use --seed=N", problem_of(nil, { seed = 1 }))
    end)

    it("of `quick` apply with --quick, before --set", function()
      local quick = { context = { 64 }, policy = "quest", prompts = 1 }
      run({ quick = quick }, { prompts = 3 }, { quick = true })
      assert.same({ "64 quest 0.1", "64 quest 0.3" }, harness.calls)
      assert.equal(3, json.decode(lines()[1]).config.prompts)
      run({ quick = quick }, { fresh = true })
      assert.equal(8, #harness.calls)
      assert.matches(HERE .. ":%d+: quick: nothing is called prompt; did you mean "
        .. "prompts%?", problem_of({ quick = { prompt = 1 } }, nil, { quick = true }))
    end)
  end)

  describe("run", function()
    it("that fails is named with its configuration, and its rows stay", function()
      local problem = problem_of { run = function(config)
        if config.policy == "random" then error "no such policy" end
        return { x = 1 }
      end }
      assert.matches("^no such policy\n  configuration context=512 policy=random "
        .. "budget=0%.1\n  at %S*experiment_spec.lua:%d+\n  2 of 8 rows are in", problem)
      assert.equal(2, #lines())
    end)

    it("goes on after a failure with --keep-going, and fails in the end", function()
      local problem = problem_of({ run = function(config)
        if config.policy == "random" then error "no such policy" end
        return { x = 1 }
      end }, nil, { ["keep-going"] = true })
      assert_has("4 configurations failed; 4 of 8 rows are in", problem)
      local _, count = harness.printed:gsub("no such policy\n  configuration context", "")
      assert.equal(4, count)
      assert.equal(4, #lines())
    end)

    it("that is interrupted keeps its rows and says how to go on", function()
      local torn_down = false
      local problem = problem_of {
        run = function(config)
          if config.context == 1024 then error("op: interrupted", 0) end
          return { x = 1 }
        end,
        teardown = function() torn_down = true end,
      }
      assert.equal("interrupted", problem)
      assert_has("interrupted: 4 of 8 rows are in", harness.printed)
      assert_has("the same command goes on from there", harness.printed)
      assert.is_true(torn_down)
      run()
      assert.equal(4, #harness.calls)
    end)

    it("must return metrics, all that are asked for", function()
      local function returns(value, other)
        local spec = { run = function() return value end }
        for key, more in pairs(other or {}) do spec[key] = more end
        return problem_of(spec)
      end
      assert_has("returned a nil, expected a table", returns(nil))
      assert_has("returned no metrics", returns {})
      assert_has("metric x is a table", returns { x = {} })
      assert_has("metrics have the key 1", returns { 5 })
      assert_has("metrics have no y; there is x",
        returns({ x = 1 }, { metrics = { "y" } }))
      local view = { rows = "policy", columns = "budget", value = "accuracy",
                     where = { context = 512 } }
      assert_has("metrics have no accuracy", returns({ x = 1 }, { table = view }))
    end)

    it("sees what setup adds to the settings; neither runs when nothing is missing",
      function()
        local events = {}
        local spec = {
          setup = function(settings)
            settings.model = { "weights" }
            events[#events + 1] = "setup " .. #settings.configs
          end,
          run = function(_, settings) return { model = settings.model[1] } end,
          teardown = function(settings)
            events[#events + 1] = "end " .. settings.model[1]
          end,
        }
        run(spec)
        run(spec)
        assert.same({ "setup 8", "end weights" }, events)
      end)

    it("is quiet on stderr when that is no terminal", function()
      run({ table = { rows = "policy", columns = "budget", value = "accuracy",
                      where = { context = 1024 }, format = "%.2f" } })
      assert.equal([[

accuracy at context = 1024
policy \ budget   0.1   0.3
---------------------------
quest            0.80  2.40
random           0.80  2.40

]] .. path "results.jsonl" .. "\n" .. path "report.html" .. "\n", harness.printed)
    end)
  end)

  it("begins anew after a failure: what it spoilt reaches no other configuration",
    function()
      local events = {}
      local problem = problem_of({
        setup = function(settings)
          settings.step, events[#events + 1] = 0, "setup"
        end,
        run = function(config, settings)
          local sitting = experiment.memo({ context = config.context }, function()
            return { value = 1, close = function() events[#events + 1] = "close" end }
          end)
          settings.step = settings.step + 1
          assert(settings.step <= 4, "a spoilt session goes on")
          if config.policy == "random" and config.budget == 0.1 then
            settings.step, sitting.value = 100, 2
            error("it is bad", 0)
          end
          return { accuracy = sitting.value }
        end,
        teardown = function() events[#events + 1] = "teardown" end,
      }, {}, { ["keep-going"] = true })
      assert_has("2 configurations failed; 6 of 8 rows are in", problem)
      for _, line in ipairs(lines()) do assert_has('"accuracy": 1', line) end
      assert.same({ "setup", "close", "teardown", "setup", "close", "close", "teardown",
                    "setup", "close", "teardown" }, events)
    end)

  describe("repeats", function()
    --- Seeds in the order of the rows, and how often setup and teardown were called.
    local function repeated(set, other)
      local seeds, calls, at = {}, {}, nil
      local answer = run({
        repeats = 3,
        setup = function(s)
          calls[#calls + 1] = ("setup %d"):format(#s.configs)
          s.cached = s.seed
        end,
        run = function(config, settings)
          assert(settings.cached == config.seed and settings.seed == config.seed)
          if config.seed ~= at then at, seeds[#seeds + 1] = config.seed, config.seed end
          return { x = config.seed % 10, accuracy = config.budget }
        end,
        teardown = function() calls[#calls + 1] = "teardown" end,
        table = { rows = "policy", columns = "context", value = "accuracy",
                  where = { budget = 0.1 } },
      }, set, other)
      return seeds, calls, answer
    end

    it("give their seed to the policies that draw", function()
      local policy = require "kvlab.policy.policy"
      local seen = {}
      run({ grid = { { "policy", { "random" } } }, run = function(config)
        assert(policy("random").seed == config.seed)
        seen[#seen + 1] = config.seed
        return { accuracy = 1, step_us = 1 }
      end }, { ["repeats"] = 3 })
      assert.equal(3, #seen)
      assert.equal(0, policy("random").seed)
    end)

    it("run everything for one seed, then for the next", function()
      local seeds, calls, answer = repeated()
      assert.equal(3, #seeds)
      assert.equal(24, #answer.rows)
      assert.same({ "setup 8", "teardown", "setup 8", "teardown", "setup 8", "teardown" },
        calls)
      assert_has("quest             0.1   0.1\n", harness.printed)
    end)

    it("have the seed that was given first, others from it, 32 bits, none twice",
      function()
        local seeds = repeated({ ["repeats"] = 200 }, { seed = 12 })
        local seen = {}
        for _, seed in ipairs(seeds) do
          assert.is_true(seed >= 0 and seed < 2 ^ 32 and seed % 1 == 0 and not seen[seed])
          seen[seed] = true
        end
        assert.equal(12, seeds[1])
        local others = repeated({ ["repeats"] = 200, fresh = true }, { seed = 13 })
        for i = 2, 200 do assert.is_nil(seen[others[i]]) end
      end)

    it("that are more add to those that are there", function()
      local first = repeated { ["repeats"] = 2 }
      local more = repeated { ["repeats"] = 4 }
      assert.equal(2, #more)
      assert_has("resumed 16 of 32", harness.printed)
      assert.same({ first[1], first[2], more[1], more[2] },
        (repeated { ["repeats"] = 4, fresh = true }))
    end)

    it("are counted", function()
      assert_has("--set repeats is 0, expected a whole number from 1",
        problem_of(nil, { ["repeats"] = 0 }))
      assert_has("experiment: repeats is 1.5", problem_of { repeats = 1.5 })
    end)
  end)

  describe("specification", function()
    it("is blamed at the script's line", function()
      local problem = problem_of { tabel = {} }
      assert.truthy(problem:match(HERE .. ':%d+: experiment: "tabel" is no option, '
        .. "did you mean table%?"))
      assert_has("run is missing, expected a function", problem_of { whole = { name = "x",
        grid = {} } })
      assert_has("name is \"a/b\"", problem_of { name = "a/b" })
      assert_has("experiment: grid is missing, expected a table",
        select(2, pcall(experiment.run)))
    end)

    it("is checked before anything runs", function()
      local function view(what, fields)
        local problem = problem_of { [what] = fields }
        assert.same({}, harness.calls)
        return problem
      end
      assert_has("rows is polcy, which is no axis; did you mean policy?",
        view("table", { rows = "polcy", value = "x" }))
      assert_has("axis context has 2 values; place it in rows, columns or where",
        view("table", { rows = "policy", columns = "budget", value = "x" }))
      assert_has("where names contxt, which is no axis; did you mean context?",
        view("table", { rows = "policy", value = "x", where = { contxt = 1 } }))
      assert_has('plot: "seires" is no option, did you mean series?',
        view("plot", { x = "budget", y = "accuracy", seires = "policy" }))
      assert_has("axis context has 2 values; place it in x, series, panel or where",
        view("plot", { x = "budget", y = "accuracy", series = "policy" }))
    end)

    it("takes zipped axes as placed where one tells the others", function()
      local grid = { { { "slots", "size" }, { { 2, 1024 }, { 4, 512 }, { 8, 512 } } } }
      run { grid = grid, run = function(c) return { accuracy = c.size } end,
            table = { rows = "slots", value = "accuracy" } }
      assert_has("4           512\n", harness.printed)
      assert_has("axis slots has 3 values; place it in rows, columns or where",
        problem_of { grid = grid, table = { rows = "size", value = "x" } })
    end)

    it("of two metrics has both in its caption, and needs both", function()
      local view = { rows = "policy", columns = "budget", value = "accuracy",
                     beside = "share", where = { context = 1024 } }
      local answer = run { table = view,
        run = function() return { accuracy = 1, share = 0.5 } end }
      assert.equal("accuracy (share) at context = 1024", answer.tables[1].caption)
      assert.equal(0.5, answer.tables[1].rows[1][2].beside)
      assert_has("metrics have no share; there is accuracy", problem_of({ table = view,
        run = function() return { accuracy = 1 } end }, { fresh = true }))
    end)

    it("shows the last value of an axis that lost the one in `where`", function()
      run({ table = { rows = "policy", columns = "budget", value = "accuracy",
                      where = { context = 1024 } } }, { context = "32,64" })
      assert_has("accuracy at context = 64\n", harness.printed)
    end)
  end)

  describe("pictures", function()
    local program = plot.gnuplot
    after_each(function() plot.gnuplot = program end)
    local views = {
      { x = "budget", y = "accuracy", series = "policy", panel = "context", logx = true },
      { x = "budget", y = "accuracy", series = "policy", where = { context = 512 } },
    }

    it("are written beside the report and into it", function()
      plot.gnuplot = "printf"
      local real = plot.svg
      plot.svg = function(p) return "<svg>" .. p.title .. "</svg>" end
      local answer = run { plot = views }
      plot.svg = real
      assert.equal("<svg>accuracy by budget</svg>", read "accuracy_by_budget.svg")
      assert.equal("<svg>accuracy by budget (context = 512)</svg>",
        read "accuracy_by_budget_2.svg")
      assert_has("accuracy by budget (context = 512)</svg>", read "report.html")
      assert.equal(path "accuracy_by_budget_2.svg", answer.paths[4])
    end)

    it("have titles that may name a default in braces", function()
      local titles, real = {}, plot.svg
      plot.svg = function(p)
        titles[#titles + 1] = p.title
        return "<svg/>"
      end
      run { defaults = { prompts = 2, tokens = 32 }, plot = {
        { x = "budget", y = "accuracy", series = "policy", panel = "context",
          title = "{tokens} tokens, {other}" },
        { x = "budget", y = "accuracy", series = "policy", panel = "context",
          ylabel = "right", xlabel = "read" } } }
      plot.svg = real
      assert.same({ "32 tokens, {other}", "right by read" }, titles)
    end)

    it("are missed, with one line, where there is no gnuplot", function()
      plot.gnuplot = "kvlab-no-such-gnuplot"
      run { plot = views }
      local _, count = harness.printed:gsub("gnuplot is not installed", "")
      assert.equal(1, count)
      assert_has("no plots are drawn", read "report.html")
      assert.equal(8, #lines())
    end)

    it("and tables may come from functions of the rows and settings", function()
      plot.gnuplot = "kvlab-no-such-gnuplot"
      local seen
      run {
        table = function(rows, settings)
          assert.equal(path "results.jsonl", settings.out .. "/results.jsonl")
          return { header = { "rows" }, rows = { { #rows } } }
        end,
        plot = function(rows, settings)
          seen = #rows
          assert.equal(path "results.jsonl", settings.out .. "/results.jsonl")
          return plot.lines(rows, { x = "budget", y = "accuracy", series = "policy",
            where = { context = 512 } })
        end,
      }
      assert.equal(8, seen)
      assert_has("rows\n----\n   8\n", harness.printed)
    end)

    it("are written as PDF and PNG, too, where --formats asks", function()
      if not plot.svg(plot.lines({}, { x = "x", y = "y" })) then
        return pending "gnuplot is not installed"
      end
      local answer = run({ plot = views }, nil, { formats = { "svg", "pdf", "png" } })
      for _, name in ipairs { "accuracy_by_budget", "accuracy_by_budget_2" } do
        assert.truthy(read(name .. ".svg"):find "^<%?xml")
        assert.truthy(read(name .. ".pdf"):find "^%%PDF")
        assert.truthy(read(name .. ".png"):find "^\137PNG")
      end
      assert.equal(2 + 2 * 3, #answer.paths)
      assert.equal(path "accuracy_by_budget.pdf", answer.paths[4])
      run { plot = views } -- other rows, perhaps, which the PDF would not show
      assert.is_nil(io.open(path "accuracy_by_budget.pdf"))
      assert.error_matches(function() run({}, nil, { formats = {} }) end,
        "formats is empty, expected svg, pdf or png")
      assert.error_matches(function() run({}, nil, { formats = { "eps" } }) end,
        "formats is eps, expected svg, pdf or png")
    end)

    it("show another cost where --over asks", function()
      local o = {
        metrics = { "accuracy", "bytes_share", "held_share" },
        grid = { { "policy", { "quest", "tova" } }, { "budget", { 0.1, 0.3 } } },
        run = function(c)
          return { accuracy = c.budget, bytes_share = c.budget,
                   held_share = c.policy == "quest" and 1 or c.budget }
        end,
        table = {
          { rows = "policy", columns = "budget", value = "accuracy",
            beside = "bytes_share" },
          { front = "accuracy", over = "bytes_share" },
        },
        plot = { x = "bytes_share", y = "accuracy", series = "policy", front = true,
                 title = "accuracy over {over}" },
      }
      local answer = run(o)
      assert.equal("accuracy (bytes_share)", answer.tables[1].caption)
      assert_has("accuracy over bytes read", read "accuracy_by_bytes_share.svg")
      answer = run(o, nil, { over = "held_share" })
      assert_has("resumed 4 of 4", harness.printed)
      assert.equal("accuracy (held_share)", answer.tables[1].caption)
      assert.equal(1, answer.tables[1].rows[1][2].beside)
      assert.equal("Pareto front of accuracy over held_share", answer.tables[2].caption)
      assert.same({ "tova", "0.1", 0.1, 0.1 }, answer.tables[2].rows[1])
      assert_has("accuracy over bytes held", read "accuracy_by_held_share.svg")
      assert_has("bytes held, as a share of all of K and V",
        read "accuracy_by_held_share.svg")
      assert_has("--over is held, expected bytes_share, held_share, moved_share",
        problem_of(o, nil, { over = "held" }))
      assert_has("--over is moved_share, which rows of spec do not have",
        problem_of(o, nil, { over = "moved_share" }))
    end)

    it("say which rows are older than the cost that --over asks for", function()
      local o = { metrics = { "accuracy", "bytes_share" }, run = function(c)
        return { accuracy = c.budget, bytes_share = c.budget }
      end }
      run(o, { policy = "quest", context = 512 })
      o.metrics[3] = "held_share"
      o.run = function(c)
        return { accuracy = c.budget, bytes_share = c.budget, held_share = 1 }
      end
      o.table = { rows = "policy", columns = "budget", value = "accuracy",
                  beside = "bytes_share" }
      local answer = run(o, { context = 512, stale = "keep" }, { over = "held_share" })
      assert_has("2 of 4 rows have no held_share: it was not counted when they were "
        .. "computed", harness.printed)
      assert.same({ "quest", 0.1, 0.3 }, answer.tables[1].rows[1])
      assert.equal(1, answer.tables[1].rows[2][2].beside)
    end)

    it("and rows are a file of comma-separated values, too, where --csv asks", function()
      plot.gnuplot = "kvlab-no-such-gnuplot"
      local answer = run({}, nil, { csv = true })
      assert.equal(path "results.csv", answer.paths[3])
      assert.equal("context,policy,budget,accuracy,step_us\n"
        .. "512,quest,0.10000000000000001,0.80000000000000004,3\n",
        read("results.csv"):match "^[^\n]*\n[^\n]*\n")
      assert.equal(9, select(2, read("results.csv"):gsub("\n", "")))
    end)

    it("and the report escape the names of policies", function()
      local evil = "<script>\"'"
      run { grid = { { "policy", { evil } }, { "budget", { 0.1, 0.2 } } },
        run = function() return { accuracy = 1 } end, title = evil,
        plot = { x = "budget", y = "accuracy", series = "policy" } }
      assert.equal(evil, json.decode(lines()[1]).config.policy)
      local _, count = read("report.html"):gsub("<script>", "")
      assert.equal(1, count)
    end)
  end)
end)
