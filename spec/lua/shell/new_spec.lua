--- What `kvlab new` writes works as it is, outside the project.
local files = require "kvlab.files"
local temporary = require "spec.temporary"

local executable = (package.loaded["kvlab.paths"] or {}).executable

describe("kvlab new #release", function()
  if not executable then return end
  local folder

  before_each(function() folder = temporary.folder() end)

  --- The exit status and output of `kvlab …`, in the folder.
  local function kvlab(...)
    local command = ("cd %s && unset KVLAB_PATH && %s 2>&1; echo $?"):format(
      files.shell_line { folder }, files.shell_line { executable, ... })
    local pipe = io.popen(command)
    local output, status = pipe:read("*a"):match "^(.-)(%d+)\n$"
    pipe:close()
    return tonumber(status), output
  end

  local function ok(...)
    local status, output = kvlab(...)
    assert.equal(0, status, output)
    return output
  end

  local function has(words, text) assert.truthy(text:find(words, 1, true), text) end

  it("writes a policy that keeps the contract and is known by its name", function()
    local told = ok("new", "policy", "mine")
    has("./policies/mine.lua\n", told)
    has("kvlab test policy ./policies/mine.lua ", told)
    has("kvlab time quest,./policies/mine.lua ", told)
    -- the contract, and with --full whatever a policy has to pass
    has("0 failed", ok("test", "policy", "policies/mine.lua",
      require("spec.support").is_full and "--full" or "--filter=policy mine "))
    files.write(folder .. "/a.lua", 'print(require("kvlab").policy("mine").name)')
    assert.equal("mine\n", ok("run", "a.lua"))
  end)

  it("writes a policy whose summary and score are expressions", function()
    ok("new", "policy", "mine")
    files.write(folder .. "/a.lua", [[
      local own = require("kvlab").policy("mine").expressions
      print(own.fields ~= nil, own.score ~= nil)]])
    assert.equal("true\ttrue\n", ok("run", "a.lua"))
  end)

  it("writes an eviction that a hot cache takes by its name", function()
    has("./evictions/mine.lua\noffload = { hot_slots = 512, evict = \"mine\" } ",
      ok("new", "eviction", "mine"))
    files.write(folder .. "/a.lua", [[
      local kv = require "kvlab"
      local s = kv.synthetic { shape = "small", context = 512, device = "cpu",
        decode_policy = kv.policy("quest", { blocks = 4 }),
        offload = { slot_blocks = 1, hot_slots = 5, evict = "mine" } }
      local seq = s:sequence(500)
      for step = 1, 4 do
        s:turn(1, step)
        s:decode { seq }
      end
      print(kv.eviction("mine").name, s.cache.tier.hot:stats().evictions > 0)]])
    assert.equal("mine\ttrue\n", ok("run", "a.lua"))
    has("new: there is an eviction lfu already, ", (select(2, kvlab("new", "eviction",
      "lfu"))))
  end)

  it("writes an experiment that runs, also with a policy of one's own", function()
    ok("new", "policy", "mine")
    ok("new", "experiment", "first", "--path=.")
    has("mine", ok("run", "experiments/first.lua", "--quick", "--device=cpu",
      "--set", "policy=mine,tova", "--set", "context=512", "--set", "budget=0.3"))
    has('"policies/mine.lua": "',
      files.read(folder .. "/results/first-quick/results.jsonl"))
  end)

  it("finds policies in the folders of --path and KVLAB_PATH", function()
    ok("new", "policy", "far", "--path=" .. folder .. "/deep")
    files.write(folder .. "/a.lua", 'print(require("kvlab").policy("far").name)')
    has('no policy "far"', (select(2, kvlab("run", "a.lua"))))
    assert.equal("far\n", ok("run", "a.lua", "--path=deep"))
    local pipe = io.popen(("cd %s && KVLAB_PATH=/nowhere:deep %s run a.lua"):format(
      files.shell_line { folder }, files.shell_line { executable }))
    assert.equal("far\n", pipe:read "*a")
    pipe:close()
  end)

  it("blames a policy's file for a definition that is wrong", function()
    files.make_folder(folder .. "/policies")
    files.write(folder .. "/policies/typo.lua",
      'return require("kvlab").policy.define { name = "typo", scores = 1 }')
    files.write(folder .. "/a.lua", 'require("kvlab").policy "typo"')
    local words = './policies/typo.lua: policy typo: "scores" is no option, did you mean '
    has("policy typo cannot be loaded: " .. words, (select(2, kvlab("run", "a.lua"))))
    has("kvlab: " .. words, (select(2, kvlab("test", "policy", "typo"))))
  end)

  it("says of an empty file of any kind that it returns nothing", function()
    for _, kind in ipairs { "split", "eviction", "task" } do
      files.make_folder(("%s/%ss"):format(folder, kind))
      files.write(("%s/%ss/empty.lua"):format(folder, kind), "")
      files.write(folder .. "/a.lua",
        ('print(pcall(require("kvlab").%s, "empty"))'):format(kind))
      has(("./%ss/empty.lua returns nothing, expected what kv.%s.define returns")
        :format(kind, kind), ok("run", "a.lua"))
    end
  end)

  it("makes files that no other spec finds", function()
    files.make_folder(folder .. "/policies")
    files.write(folder .. "/policies/mine.lua", "")
    files.write(folder .. "/own_spec.lua", [[
      it("finds what is shipped", function()
        local policy = require("kvlab").policy
        assert.matches("no policy \"mine\"", select(2, pcall(policy, "mine")))
        assert.equal("quest", policy("quest").name)
      end)]])
    has("\n1 passed, 0 failed", ok("test", "own_spec.lua"))
  end)

  it("leaves policies that are not finished out, by name, unless they are asked for",
    function()
      files.make_folder(folder .. "/policies")
      files.write(folder .. "/policies/empty.lua", "")
      files.write(folder .. "/policies/half.lua", "return {")
      files.write(folder .. "/policies/wrong.lua", "return function() error 'no' end")
      files.write(folder .. "/all.lua",
        'print(table.concat(require("kvlab").policy.names "decode", " "))')
      local text = ok("run", "all.lua")
      has(" quest ", text)
      has("kvlab: not among the policies: empty, half, wrong (kvlab test policy empty "
        .. "says why)\n", text)
      assert.is_nil(ok("run", "all.lua", "--set=policy=quest"):find("half", 1, true))
      files.write(folder .. "/a.lua", 'require("kvlab").policy "empty"')
      local status, output = kvlab("run", "a.lua")
      assert.equal(1, status)
      has("a.lua:1: the policy empty: ./policies/empty.lua returns nothing", output)
      for name, words in pairs {
        empty = "./policies/empty.lua returns nothing, expected what kv.policy.define "
          .. "returns",
        half = "./policies/half.lua:1: unexpected symbol near '<eof>'",
        wrong = "./policies/wrong.lua:1: no" } do
        status, output = kvlab("test", "policy", name)
        assert.same({ 1, "kvlab: " .. words .. "\n" }, { status, output })
      end
    end)

  it("is followed by a test that runs every spec which a policy has to pass", function()
    ok("new", "policy", "mine")
    local listed = ok("test", "policy", "mine", "--list")
    local pipe = io.popen(("cd %s && grep -rlE ' #policy[\" ]' --include='*_spec.lua' .")
      :format(files.shell_line { require("kvlab").paths.root .. "/spec" }))
    for path in pipe:lines() do
      local is_of_others = path:find "shell/new_spec"
        or path:find "serve/evicting_spec" -- this policy does not evict
      if not is_of_others then has(path:sub(2), listed) end
    end
    pipe:close()
  end)

  it("is followed by a test that finds what no single step shows", function()
    files.make_folder(folder .. "/policies")
    files.write(folder .. "/policies/turns.lua", [[
      local kv = require "kvlab" -- it has no take_back
      return kv.policy.define {
        name = "turns", decode = true, own_bytes = 0, eager = true,
        defaults = { ratio = 0.3 },
        step_begin = function(self, ctx)
          for _, seq in ipairs(ctx.sequences) do
            seq.state[self] = (seq.state[self] or 0) + 1
          end
        end,
        inherit = function(self, seq, fork) fork.state[self] = seq.state[self] end,
        score = function(self, ctx)
          local scores, times = ctx:new_scores(1):arange_(), {}
          for i, seq in ipairs(ctx.sequences) do times[i] = (-1) ^ seq.state[self] end
          times = kv.from(ctx.device, "f32", times):reshape { -1, 1, 1 }
          return scores:mul(times, scores)
        end,
      }]])
    local status, output = kvlab("test", "policy", "turns", "--filter=taken back")
    assert.equal(1, status, output)
    has("is as if tokens that are taken back had never been", output)
    has("1 failed", output)
  end)

  it("refuses what exists, wrong names and kinds, and a name that is taken", function()
    ok("new", "policy", "mine")
    has("new: ./policies/mine.lua exists", (select(2, kvlab("new", "policy", "mine"))))
    has('the name is "a-b", expected letters',
      (select(2, kvlab("new", "policy", "a-b"))))
    has('new has no "x"; expected policy, eviction or experiment',
      (select(2, kvlab("new", "x", "y"))))
    has("new: there is a policy quest already, ", (select(2, kvlab("new", "policy",
      "quest"))))
    files.write(folder .. "/policies/quest.lua",
      files.read(folder .. "/policies/mine.lua"))
    files.write(folder .. "/a.lua", 'require("kvlab").policy "quest"')
    local status, output = kvlab("run", "a.lua")
    assert.equal(1, status)
    has('there are several policies "quest": ', output)
  end)
end)
