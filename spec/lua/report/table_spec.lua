local text_table = require "kvlab.report.table"

local function row(policy, budget, context, accuracy)
  return { config = { policy = policy, budget = budget, context = context },
           metrics = { accuracy = accuracy } }
end

local rows = {
  row("full", 0.3, 512, 1), row("quest", 0.1, 512, 0.98765), row("quest", 0.05, 512, 0.9),
  row("quest", 0.1, 1024, 0.5), row("blöck", 0.05, 512, 0 / 0),
}

describe("table", function()
  it("aligns numbers to the right and words to the left", function()
    local text = text_table.text {
      caption = "Bytes", header = { "policy", "bytes", "share", "exact" },
      rows = { { "full", 2 ^ 20, 1, true }, { "blöck", 1234.56, 0.012345, false },
               { "x", nil, 1.5e-7, nil } },
    }
    assert.equal([[
Bytes
policy    bytes    share  exact
-------------------------------
full    1048576        1  true
blöck      1235  0.01235  false
x             -  1.5e-07  -
]], text)
  end)

  it("pivots one metric: lines as they come, numbers ascending", function()
    local t = text_table.pivot(rows, { rows = "policy", columns = "budget",
      value = "accuracy", where = { context = 512 }, format = "%.3f" })
    assert.equal([[
policy \ budget   0.05    0.1    0.3
------------------------------------
full                 -      -  1.000
quest            0.900  0.988      -
blöck              nan      -      -
]], text_table.text(t))
  end)

  it("writes an interval beside its mean", function()
    local repeated = { config = { policy = "quest", budget = 0.1, context = 512 },
                       metrics = { accuracy = 0.93 }, low = { accuracy = 0.9 },
                       high = { accuracy = 0.96 } }
    local view = { rows = "policy", columns = "budget", value = "accuracy" }
    local t = text_table.pivot({ repeated, rows[3], rows[5] }, view)
    assert.equal([[
policy \ budget  0.05          0.1
----------------------------------
quest             0.9  0.93 ± 0.03
blöck             nan            -
]], text_table.text(t))
    t.format = "%.3f"
    assert.truthy(text_table.text(t):find("0.930 ± 0.030", 1, true))
  end)

  it("is written as comma-separated values that keep every digit", function()
    assert.equal('policy,"a,b",ok\n"say ""so""",0.10000000000000001,true\n'
      .. 'x,nan,\n"two\nlines",0.25,false\n',
      text_table.csv { header = { "policy", "a,b", "ok" }, rows = {
        { 'say "so"', 0.1, true }, { "x", 0 / 0, nil }, { "two\nlines", 0.25, false } } })
  end)

  it("is written so that no spreadsheet runs a cell", function()
    assert.equal("'=1+1,'@x,-5,'-x\n\"'=HYPERLINK(\"\"x\"\")\",'+cmd|a,-0.5,\"'\rx\"\n",
      text_table.csv { header = { "=1+1", "@x", "-5", "-x" },
        rows = { { '=HYPERLINK("x")', "+cmd|a", -0.5, "\rx" } } })
  end)

  it("refuses to put two rows into one cell", function()
    assert.error_matches(function()
      text_table.pivot(rows, { rows = "policy", columns = "budget", value = "accuracy" })
    end, "policy = quest in column 0.1")
  end)

  it("shows a row without an axis for all of its values", function()
    local some = { row("full", nil, 512, 1), row("quest", 0.05, 512, 0.9),
                   row("quest", 0.1, 512, 0.95), row("quest", 0.1, 1024, 0.5) }
    local t = text_table.pivot(some, { rows = "policy", columns = "budget",
      value = "accuracy", where = { context = 512, budget = 0.1 } })
    assert.same({ { "full", 1 }, { "quest", 0.95 } }, t.rows)
    t = text_table.pivot(some, { rows = "policy", columns = "budget",
      value = "accuracy", where = { context = 512 } })
    assert.same({ { "full", 1, 1 }, { "quest", 0.9, 0.95 } }, t.rows)
    t = text_table.pivot(some, { rows = "budget", columns = "policy",
      value = "accuracy", where = { context = 512 } })
    assert.same({ { "0.05", 1, 0.9 }, { "0.1", 1, 0.95 } }, t.rows)
  end)

  it("lists whole rows, metrics in the given order", function()
    local one = { config = { a = 1, seed = 0 }, metrics = { x = 1, b = 2, y = 3 } }
    local t = text_table.of_rows({ one }, { { name = "a" } }, { "a", "y", "x" })
    assert.same({ header = { "a", "y", "x", "b" }, rows = { { 1, 3, 1, 2 } } }, t)
  end)

  it("keeps a control character from breaking a line", function()
    local text = text_table.text { header = { "a" }, rows = { { "x\ny\27[31m" } } }
    assert.equal("a\n--------\nx y [31m\n", text)
  end)

  it("is empty without rows", function()
    assert.equal("a  b\n----\n", text_table.text { header = { "a", "b" }, rows = {} })
    local t = text_table.pivot({}, { rows = "a", columns = "b", value = "c" })
    assert.same({}, t.rows)
  end)

  local function noted(policy, budget, accuracy, share, note)
    return { config = { policy = policy, budget = budget },
             metrics = { accuracy = accuracy, bytes_share = share, note = note } }
  end
  local ROWS = { noted("a", 1, 0.25, 0.1, "sink is more"), noted("a", 2, 0.5, 0.2),
                 noted("b", 1, 0.75, 0.05, "sink is more"), noted("b", 2, 0.5, 0.3),
                 noted("b", 3, 1, 0.9), noted("a", 3, 0.4, 0.15) }

  it("marks cells whose rows have a note, and says what the mark means", function()
    local t = text_table.pivot(ROWS, { rows = "policy", columns = "budget",
      value = "accuracy" })
    assert.equal([[
policy \ budget      1    2    3
--------------------------------
a                0.25*  0.5  0.4
b                0.75*  0.5    1
* sink is more
]], text_table.text(t))
  end)

  it("writes a second metric beside the first, in brackets", function()
    local repeated = { config = { policy = "c", budget = 3 }, low = { accuracy = 0.5 },
                       high = { accuracy = 0.7 },
                       metrics = { accuracy = 0.6, bytes_share = 0.0826 } }
    local t = text_table.pivot({ repeated, ROWS[1], ROWS[4] }, { rows = "policy",
      columns = "budget", value = "accuracy", beside = "bytes_share", format = "%.2f" })
    assert.equal([[
policy \ budget            1           2                    3
-------------------------------------------------------------
c                          -           -  0.60 ± 0.10 (0.083)
a                0.25 (0.1)*           -                    -
b                          -  0.50 (0.3)                    -
* sink is more
]], text_table.text(t))
  end)

  it("marks stale rows, which have a column of their own in a table of all", function()
    local stale = noted("a", 1, 0.25, 0.1)
    stale.stale = { "lua", "quest.lua" }
    local t = text_table.pivot({ stale }, { rows = "policy", value = "accuracy" })
    assert.same({ "stale: changed since, lua, quest.lua" }, t.notes)
    local all = text_table.of_rows({ stale, ROWS[2] }, { { name = "policy" } }, {})
    assert.equal("stale", all.header[#all.header])
    assert.equal("lua, quest.lua", all.rows[1][#all.header])
    assert.is_nil(all.rows[2][#all.header])
  end)

  it("writes an interval that is longer on one side with its ends", function()
    assert.equal("0.97 [0.91, 1]",
      text_table.format_cell { mean = 0.97, low = 0.91, high = 1 })
    assert.equal("0.5 ± 0.1*",
      text_table.format_cell { mean = 0.5, low = 0.4, high = 0.6, mark = "m" })
  end)

  it("finds a Pareto front, in which marked rows take no part", function()
    local t = text_table.front(ROWS, { front = "accuracy", over = "bytes_share",
      axes = { "policy", "budget" } })
    assert.same({ "policy", "budget", "bytes_share", "accuracy" }, t.header)
    assert.same({ { "a", "3", 0.15, 0.4 }, { "a", "2", 0.2, 0.5 }, { "b", "3", 0.9, 1 } },
      t.rows)
  end)

  it("shows a Pareto front with the intervals that rows have", function()
    local repeated = { config = { policy = "a" }, low = { accuracy = 0.5 },
                       high = { accuracy = 0.7 },
                       metrics = { accuracy = 0.6, bytes_share = 0.25 } }
    local t = text_table.front({ repeated }, { front = "accuracy", over = "bytes_share",
      axes = { "policy" }, format = "%.2f" })
    assert.equal("a              0.25  0.60 ± 0.10",
      text_table.text(t):match "([^\n]+)\n$")
  end)
end)
