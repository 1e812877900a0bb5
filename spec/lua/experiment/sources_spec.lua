--- What made a row: every file that a model, a tokenizer, a task or a script of it reads.
local files = require "kvlab.files"
local harness = require "spec.lua.experiment.experiment_support"
local json = require "kvlab.json"
local kv = require "kvlab"
local library = require "kvlab.library"
local sources = require "kvlab.sources"
local temporary = require "spec.temporary"

local folder

local function path(name) return folder .. "/" .. name end

--- How many rows of an experiment that calls fn are computed, and with which sources.
local function run(fn)
  harness.run { name = "sources", grid = { { "n", { 1, 2 } } }, defaults = {},
    run = function(config)
      harness.calls[#harness.calls + 1] = config.n
      fn()
      return { x = 1 }
    end }
  return #harness.calls, json.decode(harness.lines()[2]).made_by
end

--- Whether rows are computed again after `edit`, once, and then no more.
local function is_noticed(fn, edit)
  run(fn)
  assert.equal(0, (run(fn)), "a row is stale although nothing has changed")
  edit()
  local again = run(fn)
  assert.equal(0, (run(fn)), "a row stays stale")
  return again == 2
end

describe("a row's sources", function()
  before_each(function()
    harness.make_folder()
    folder = temporary.folder()
  end)

  describe("are all files of a tokenizer:", function()
    before_each(function()
      files.write(path "tokenizer.json",
        files.read(library.paths.root .. "/spec/data/tokenizers/smollm.json"))
      files.write(path "tokenizer_config.json", '{"bos_token": "<|endoftext|>"}')
    end)
    local function open() kv.tokenizer(folder) end

    for _, name in ipairs { "tokenizer.json", "tokenizer_config.json" } do
      it(name, function()
        assert.is_true(is_noticed(open, function()
          files.write(path(name), files.read(path(name)) .. "\n")
        end))
      end)
    end

    it("chat_template.jinja, when it comes and when it changes", function()
      assert.is_true(is_noticed(open, function()
        files.write(path "chat_template.jinja", "{{ messages }}")
      end))
      assert.is_true(is_noticed(open, function()
        files.write(path "chat_template.jinja", "{{ messages[0] }}")
      end))
      assert.is_true(is_noticed(open, function()
        os.remove(path "chat_template.jinja")
      end))
    end)
  end)

  it("are a policy's file where it is used, not where it was only listed", function()
    local given = kv.command_line.path
    kv.command_line.path = folder
    files.make_folder(path "policies")
    files.write(path "policies/empty.lua", "")
    files.write(path "policies/own.lua", [[return require("kvlab").policy.define {
      name = "own", decode = true, score = function() end }]])
    local ok, why = pcall(function()
      assert.truthy(table.concat(kv.policy.names "decode", " "):find("own", 1, true))
      local _, listed = run(function() end)
      harness.make_folder()
      local _, used = run(function() kv.policy "own" end)
      for _, name in ipairs { "empty", "own" } do
        assert.is_nil(listed[path("policies/" .. name .. ".lua")])
      end
      assert.is_nil(used[path "policies/empty.lua"])
      assert.is_string(used[path "policies/own.lua"])
    end)
    kv.command_line.path = given
    assert(ok, why)
  end)

  it("are a tensor's file and a text's", function()
    kv.npy.save(path "one.npy", kv.zeros("cpu", "f32", { 2 }))
    files.write(path "text", "A text.")
    local function read()
      kv.npy.load(path "one.npy", "cpu")
      kv.task.read_text(path "text")
    end
    assert.is_true(is_noticed(read, function()
      kv.npy.save(path "one.npy", kv.full("cpu", "f32", { 2 }, 1))
    end))
    assert.is_true(is_noticed(read, function() files.write(path "text", "Another.") end))
  end)

  it("are all files of the recall model", function()
    local exam = require "models.recall.exam"
    local _, made_by = run(function()
      exam.open({ context = 64, prompts = 1, needles = 1, block_size = 16 }):close()
    end)
    for _, name in ipairs { "config.json", "model.safetensors", "tokens.json" } do
      assert.truthy(made_by["lua/models/recall/" .. name], name)
    end
  end)

  it("have the content that was read, not what the file has become since", function()
    files.write(path "text", "old")
    local text
    local function read_once() text = text or sources.read(path "text") end
    local _, before = run(read_once)
    files.write(path "text", "new")
    local count, after = run(read_once)
    assert.equal(2, count)
    assert.equal(before[path "text"], after[path "text"]) -- it still has the old one
  end)

  it("are the user's modules, also those in a folder that is called lua", function()
    files.make_folder(path "lua")
    files.write(path "lua/own.lua", "return 1")
    files.write(path "script.lua", [[
      local own = require "lua.own"
      require("kvlab").experiment.run { name = "modules", grid = { { "n", { 1 } } },
        run = function() return { x = own } end }]])
    local command = files.shell_line { package.loaded["kvlab.paths"].executable, "run",
      "script.lua", "--out=out" }
    local pipe = io.popen(("cd %s && %s 2>&1"):format(folder, command))
    local printed = pipe:read "*a"
    pipe:close()
    local rows = assert(files.read(path "out/results.jsonl"), printed)
    assert.truthy(rows:find('"lua/own.lua"', 1, true), rows)
  end)

  -- What computes rows reads files through kvlab.sources, or a file could be forgotten.
  it("are read in one place", function()
    local rooms = { "kvlab/tensor", "kvlab/text", "kvlab/memory", "kvlab/task",
                    "kvlab/index", "kvlab/policy", "kvlab/observe", "kvlab/serve",
                    "models", "policies", "splits", "priorities",
                    "evictions", "tasks",
                    "experiments" }
    local allowed = { -- these write, or read what goes into no row
      ["kvlab/serve/trace.lua"] = 'io.open(path, "w")',
      ["experiments/20_tokens_per_second.lua"] = "files.read(settings.out", -- its table
    }
    local found = {}
    for _, room in ipairs(rooms) do
      for _, file in ipairs(files.find(library.paths.root .. "/lua/" .. room, ".lua")) do
        local name = file:match "/lua/(.*)$"
        for line in files.read(file):gmatch "[^\n]+" do
          local reads = line:find "io%.open" or line:find "io%.lines"
            or line:find "files%.read%f[%W]" or line:find "loadfile%f[%W]"
            or line:find "dofile%f[%W]"
          local is_allowed = allowed[name] and line:find(allowed[name], 1, true)
          if reads and not is_allowed then found[#found + 1] = name .. ": " .. line end
        end
      end
    end
    assert.equal("", table.concat(found, "\n"))
  end)
end)
