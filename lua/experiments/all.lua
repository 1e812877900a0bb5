--- Runs every experiment of this folder, one after the other, and makes one page that
-- shows them all.
--
--   ./kvlab run lua/experiments/all.lua --quick [--device=cuda] [--seed=1] [--out=DIR]
--   ./kvlab run lua/experiments/all.lua --quick 01_recall 14_needle
--
-- Names after the options choose some experiments; other options go to every experiment.
-- Each runs as its own process with its own folder (results/all-quick/NAME) next to the
-- page, index.html; its printed output is in NAME.txt. If one fails, the page shows that,
-- the others still run, and the exit status is not 0. Without --quick it takes hours.
local gallery = require "kvlab.experiment.gallery"
local json = require "kvlab.json"
local kv = require "kvlab"
local hint = require("kvlab.words").hint
local files = require "kvlab.files"

local FOLDER = kv.paths.root .. "/lua/experiments"

local function find_experiments()
  local names = {}
  for _, file in ipairs(files.list(FOLDER)) do
    names[#names + 1] = file:match "^(%d.*)%.lua$"
  end
  return names
end

--- Returns the names that the command line chooses; all names if it chooses none.
local function choose(names)
  if #kv.command_line.args == 0 then return names end
  local is_there, chosen = {}, {}
  for _, name in ipairs(names) do is_there[name] = true end
  for i, name in ipairs(kv.command_line.args) do
    if not is_there[name] then
      error(("no experiment %s%s"):format(name, hint(name, names)), 0)
    end
    chosen[i] = name
  end
  return chosen
end

--- Returns the options of the command line that go to each experiment: all except --out.
local function shared_options()
  local words = {}
  for _, word in ipairs(kv.command_line.words) do
    if word:match "^%-%-" and word ~= "--" and not word:match "^%-%-out=" then
      words[#words + 1] = word
    end
  end
  return words
end

local function run(name, folder, words)
  local out = folder .. "/" .. name
  local command = files.shell_line { kv.paths.executable, "run",
    ("%s/%s.lua"):format(FOLDER, name), "--out=" .. out, unpack(words) }
  local start = kv.C.kvl_clock_ns()
  local pipe = io.popen(command .. " 2>&1; echo \"status $?\"")
  local text = pipe:read "*a"
  pipe:close()
  local printed, status = text:match "^(.*)status (%d+)%s*$"
  if not printed or status == "130" then error("interrupted", 0) end
  files.write(out .. ".txt", printed)
  return { name = name, is_done = status == "0", printed = printed,
           seconds = tonumber(kv.C.kvl_clock_ns() - start) * 1e-9 }
end

local folder = kv.command_line.out
  or "results/all" .. (kv.command_line.quick and "-quick" or "")
local names, words = choose(find_experiments()), shared_options()
local entries, failed = {}, {}
files.make_folder(folder)
for i, name in ipairs(names) do
  io.write(("%2d of %d  %-24s"):format(i, #names, name))
  io.flush()
  entries[i] = run(name, folder, words)
  if not entries[i].is_done then failed[#failed + 1] = name end
  print(("%7.1f s%s"):format(entries[i].seconds, entries[i].is_done and "" or "  failed"))
end
local dev = kv.device()
local made = { dev:name() .. ", " .. dev:description(),
               "seed " .. json.encode(kv.command_line.seed), os.date "!%Y-%m-%d" }
files.write(folder .. "/index.html", gallery.html(folder,
  "kvlab: what each experiment shows", table.concat(made, " · "), entries))
print(folder .. "/index.html")
if #failed > 0 then
  io.stdout:flush() -- both streams may be one file
  error(("failed: %s; what they printed is in %s/NAME.txt"):format(
    table.concat(failed, ", "), folder), 0)
end
