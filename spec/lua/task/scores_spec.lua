--- kv.scores, beside the packages that define the scores (tools/score_goldens.py).
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"

describe("scores #release", function()
  local rows = json.decode(files.read(kv.paths.root .. "/spec/data/tasks/scores.json"))

  for _, name in ipairs { "exact", "f1", "rouge_l" } do
    it("are those of the reference packages: " .. name, function()
      local different = {}
      for _, row in ipairs(rows) do
        local got = kv.scores[name](row.given, row.answers)
        if math.abs(got - row[name]) > 1e-12 then
          different[#different + 1] = ("%q %s: %g, expected %g"):format(row.given,
            json.encode(row.answers), got, row[name])
        end
      end
      assert.same({}, different)
      assert.is_true(#rows >= 60)
    end)
  end

  it("find answers in a text, whatever the case", function()
    local given = "The numbers are 41, 7 and ÄRGER."
    assert.equal(2 / 3, kv.scores.all(given, { "41", "ärger", "12" }))
    assert.equal(1, kv.scores.part(given, { "12", "7" }))
    assert.equal(0, kv.scores.part(given, { "12" }))
    assert.equal(0, kv.scores.all("", { "12" }))
    assert.equal(1, kv.scores.all("50% (sure)", { "50% (" })) -- no pattern
  end)

  it("refuse what is no answer", function()
    for _, name in ipairs { "exact", "f1", "rouge_l", "all", "part" } do
      assert.error_matches(function() kv.scores[name]("x", {}) end,
        ("scores.%s: answers is a table, expected a list"):format(name), 1, true)
      assert.error_matches(function() kv.scores[name](nil, { "x" }) end,
        "given is nil, expected a string", 1, true)
    end
  end)
end)
