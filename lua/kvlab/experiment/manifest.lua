--- manifest.json records what a folder of results was made with, in enough detail to make
-- it again.
--
-- Name, seed and device are the folder's identity: a run with other values is refused. A
-- manifest belongs to one run, the last that computed rows, and names the earlier runs in
-- `earlier_runs`. A run that finds all of its rows in the folder leaves the manifest as
-- it is.
local json = require "kvlab.json"
local files = require "kvlab.files"
local secrets = require "kvlab.secrets"
local version = require "kvlab.version"

local M = {}

local ORDER = {
  "name", "title", "seed", "repeats", "device", "description", "driver", "date",
  "finished", "version", "commit", "dirty", "diff", "command", "arguments", "shard",
  "jobs", "quick", "axes", "defaults", "configurations", "made_by", "isa", "cpu", "os",
  "versions", "pictures",
}

local function first_line(command)
  local pipe = io.popen(command .. " 2>/dev/null")
  local line = pipe and pipe:read "*l"
  if pipe then pipe:close() end
  return line
end

local function project_root()
  local here = debug.getinfo(1, "S").source
  local source = here:match "^@(.*)lua/kvlab/experiment/manifest%.lua$"
  return source and (source == "" and "." or source) or nil
end

--- Returns the commit of this project's own repository, whether the code in the working
-- tree differs from it, and if so a hash of the difference.
local function find_commit()
  local root = project_root()
  if not root then return nil end
  local bundled = io.open(root .. "/commit") -- in a folder that `kvlab bundle` made
  if bundled then
    local words = bundled:read "*l"
    bundled:close()
    return words:gsub("%-dirty$", ""), words:find "%-dirty$" ~= nil
  end
  if not files.real(root .. "/.git") then return nil end -- within another repository
  -- git reads no other user's repository unless told that it is safe; we run its code
  local git = files.shell_line { "git", "-c", "safe.directory=*", "-C", root }
  local code, commit = " -- lua kernels runtime", nil
  local pipe, is_dirty = io.popen(git .. " status --porcelain=v2 --branch" .. code
    .. " 2>/dev/null"), false
  if not pipe then return nil end
  for line in pipe:lines() do
    commit = commit or line:match "^# branch%.oid (%x+)$"
    is_dirty = is_dirty or line:sub(1, 1) ~= "#"
  end
  pipe:close()
  if not commit or not is_dirty then return commit, false end
  local diff = first_line(("{ %s diff HEAD%s; %s ls-files -o --exclude-standard%s; }"
    .. " | sha256sum"):format(git, code, git, code))
  return commit, true, diff and diff:sub(1, 16)
end

--- Returns the command line of this process, with the program's name but not its folder.
local function command_line()
  local text = files.read "/proc/self/cmdline"
  if not text then return nil end
  local words = {}
  for word in text:gmatch "([^%z]*)%z" do words[#words + 1] = word end
  words[1] = words[1] and words[1]:match "[^/]*$"
  return files.shell_line(words)
end

local function match_file(path, pattern)
  local text = files.read(path)
  return text and text:match(pattern)
end

-- All rows of a folder have the same values of these.
local IDENTITY = { "name", "seed", "device" }

--- Returns the folder's manifest; nil if there is none.
---@param folder string
---@return table|nil
function M.read(folder)
  local path = folder .. "/manifest.json"
  local text = files.read(path)
  if not text then return nil end
  local ok, manifest = pcall(json.decode, text)
  if not ok or type(manifest) ~= "table" then
    error(path .. " is damaged; choose another --out=DIR, or --set fresh=true", 0)
  end
  for _, key in ipairs { "arguments", "pictures" } do -- may be empty
    if type(manifest[key]) == "table" then json.array(manifest[key]) end
  end
  return manifest
end

--- Raises if the folder's manifest has another experiment, seed or device. It also raises
-- if the device belongs to another machine, because timings of two machines must not be
-- mixed in one file. A folder that is merged from several (is_merged) may mix them.
---@param folder string
---@param now table  name, seed, device, description
---@param is_merged? boolean
---@return table|nil  # the folder's manifest
function M.check(folder, now, is_merged)
  local old, keys = M.read(folder), { unpack(IDENTITY) }
  if not is_merged then keys[#keys + 1] = "description" end
  for _, key in ipairs(old and keys or {}) do
    if old[key] ~= now[key] then
      error(("%s holds results of %s %s, this run has %s: choose another --out=DIR, or"
        .. " start it over with --set fresh=true"):format(folder, key,
        tostring(old[key]), tostring(now[key])), 0)
    end
  end
  return old
end

-- The fields that identify a run.
local RUN = { "date", "version", "commit", "dirty", "diff", "command" }

local function earlier_runs(old)
  local runs, last = { unpack(old.earlier_runs or {}) }, {}
  for _, key in ipairs(RUN) do last[key] = old[key] end
  runs[#runs + 1] = last
  return runs
end

local function write(folder, manifest)
  local text = json.encode(manifest, { order = ORDER, indent = "  " })
  files.write(folder .. "/manifest.json", text .. "\n")
end

local function now_utc() return os.date "!%Y-%m-%dT%H:%M:%SZ" end

-- What chooses the rows of a run.
local SELECTION = { "axes", "defaults", "repeats", "configurations" }

--- Whether a run chooses the same rows as the run of a manifest.
---@param now table
---@param old table
---@return boolean
function M.is_same_selection(now, old)
  local function chosen(manifest)
    local list = json.array {}
    for i, key in ipairs(SELECTION) do list[i] = manifest[key] or json.null end
    return json.encode(list)
  end
  return chosen(json.decode(json.encode(secrets.mask(now)))) == chosen(old)
end

--- Writes a folder's manifest.
---@param folder string
---@param now table       name, title, seed, device, description, driver, axes, …
---@param old table|nil   the manifest of the run before, whose rows this one shows, too
---@return table          # the manifest
function M.write(folder, now, old)
  local manifest = {}
  for key, value in pairs(now) do manifest[key] = value end
  manifest.date, manifest.version = now_utc(), version
  manifest.commit, manifest.dirty, manifest.diff = find_commit()
  manifest.command = command_line()
  manifest.cpu = match_file("/proc/cpuinfo", "model name%s*:%s*([^\n]*)")
  manifest.os = match_file("/etc/os-release", "PRETTY_NAME=\"?([^\n\"]*)") or jit.os
  manifest.earlier_runs = old and earlier_runs(old)
  manifest = secrets.mask(manifest)
  write(folder, manifest)
  return manifest
end

--- Returns the hashes of the sources of all rows, by name; a list of hashes where the
-- rows have several versions of a source.
local function all_sources(rows)
  local all = {}
  for _, row in ipairs(rows) do
    for name, hash in pairs(row.made_by or {}) do
      local there = all[name]
      if not there then
        all[name] = { hash }
      elseif there[#there] ~= hash then
        local has = false
        for _, other in ipairs(there) do has = has or other == hash end
        if not has then there[#there + 1] = hash end
      end
    end
  end
  for name, list in pairs(all) do
    all[name] = #list == 1 and list[1] or json.array(list)
  end
  return all
end

--- Adds the folder's pictures to a manifest, and the sources of the folder's rows.
---@param folder string
---@param manifest table
---@param names string[]  the files of the pictures, the most important one first
---@param rows table[]
function M.add_pictures(folder, manifest, names, rows)
  manifest.pictures = json.array(names)
  manifest.made_by = all_sources(rows)
  write(folder, manifest)
end

--- Adds the time to a manifest, as `finished`: every row has been computed.
---@param folder string
---@param manifest table
function M.finish(folder, manifest)
  manifest.finished = now_utc()
  write(folder, manifest)
end

return M
