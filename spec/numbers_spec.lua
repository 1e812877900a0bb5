--- The numbers of tables in docs are those of the result files that the pages name.
local doc_blocks = require "spec.doc_blocks"
local files = require "kvlab.files"
local numbers = require "spec.numbers"
local root = require("kvlab").paths.root
local temporary = require "spec.temporary"

if not io.open(root .. "/README.md") then return end -- a bundle has no docs

describe("numbers of tables", function()
  for _, page in ipairs(doc_blocks.pages(root)) do
    it("in " .. page .. " are those of its result files", function()
      local _, lines = doc_blocks.read(root, page)
      local wrong = numbers.check(root, lines)
      assert.equal("", wrong)
    end)
  end

  it("are checked where rows of results are at hand", function()
    for page, least in pairs { ["README.md"] = 2, ["docs/results.md"] = 5,
        ["docs/tasks.md"] = 2, ["docs/performance.md"] = 8 } do
      local _, lines = doc_blocks.read(root, page)
      local _, count = numbers.check(root, lines)
      assert.is_true(count >= least, page)
    end
  end)

  describe("of a page that is made up", function()
    local folder

    before_each(function()
      folder = temporary.folder()
      files.write(folder .. "/r.jsonl", [[
{"id": "header"}
{"config": {"policy": "full"}, "metrics": {"x": 1, "share": 1}}
{"config": {"policy": "a", "budget": 0.05}, "metrics": {"x": 0.1234, "share": 0.086}}
{"config": {"policy": "a", "budget": 0.1}, "metrics": {"x": 12345.6, "share": 0.164}}
{"id": "P1", "us": 41.28, "of_limit": 0.805, "note": "into out 2.8 us"}
{"id": "P11", "us": 77}
]])
    end)

    local function check(...) return (numbers.check(folder, { ... })) end

    local GRID = { "<!-- numbers: r.jsonl", "rows: policy", "columns: budget%",
      "cell: {x} ({share%})", "-->", "| policy | 5% | 10% |", "|---|---|---|" }

    local function grid(...)
      local lines = { unpack(GRID) }
      for _, line in ipairs { ... } do lines[#lines + 1] = line end
      return check(unpack(lines))
    end

    it("are right when they are rounded", function()
      assert.equal("", grid("| `a` (a remark) | 0.123 (8.6%) | 12 300 (16%) |",
        "| full | | 1.0 (100%) |"))
    end)

    it("are told when they are wrong", function()
      assert.equal('line 1: a, 5%: "0.124 (8.6%)": x is 0.1234',
        grid "| a | 0.124 (8.6%) | |")
      assert.equal('line 1: a, 10%: "12 346 (17%)": share% is 16.4',
        grid "| a | | 12 346 (17%) |")
      assert.equal("line 1: b, 5%: no row of the files", grid "| b | 0.1 | |")
      assert.equal('line 1: a, 5%: "0.123 0.2" has 2 numbers, expected 1',
        grid "| a | 0.123 0.2 | |")
    end)

    it("may be of what has another name now", function()
      assert.equal("", check("<!-- numbers: r.jsonl", "rows: policy", "columns: budget%",
        "renamed: a=b", "cell: {x}", "-->", "| policy | 5% |", "|---|---|",
        "| b | 0.123 |"))
    end)

    it("are those of the ids of a bench", function()
      local function bench(cells)
        return check("<!-- numbers: r.jsonl", "id:", "column kvlab: : x", "-->",
          "| | | kvlab |", "|---|---|---|", cells)
      end
      assert.equal("", bench "| P1 | a case | 41.3 µs, 0.80 R, 2.8 µs |")
      assert.equal("line 1: P1 a case: the rows have no 77",
        bench "| P1 | a case | 77 µs |")
    end)

    it("need a file, a table and words that are known", function()
      assert.has_error(function()
        check("<!-- numbers: no.jsonl -->", "| a |", "|---|")
      end, "there is no no.jsonl")
      assert.has_error(function() check("<!-- numbers: r.jsonl -->", "", "text") end,
        "line 1: no table comes after the comment")
      assert.has_error(function()
        check("<!-- numbers: r.jsonl", "colums: x", "-->", "| a |", "|---|")
      end, 'numbers: "colums: x" is not known')
    end)
  end)
end)
