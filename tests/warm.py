"""`python -m MODULE …` in processes of its own that begin with the imports done, which else take seconds of each: `warm`.

One server imports, and for each command a fork of it becomes that command: its arguments, folder, variables and streams."""

import atexit, contextlib, functools, json, os, runpy, signal, socket, subprocess, sys, threading

LINUX = sys.platform == "linux"


def become(args, cwd, env, streams):
    "Be the process that `python -m args` with these streams starts, without its end."
    for stream, fd in enumerate(streams):
        os.dup2(fd, stream)
        os.close(fd)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    lossless = dict(encoding="utf-8", errors="surrogateescape")
    sys.stdin = sys.__stdin__ = open(0, newline="\n", **lossless)
    sys.stdout = sys.__stdout__ = open(1, "w", newline="\n", **lossless)
    named = dict(encoding="utf-8", errors="backslashreplace", newline="\n")
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, **named)
    sys.argv, sys.path[0] = args, str(cwd)
    runpy.run_module(args[0], run_name="__main__", alter_sys=True)


def serve(asked):
    "Fork for each message of the socket `asked`, and answer with the child's number, then with its status."
    while True:
        message, streams, *_ = socket.recv_fds(asked, 2**20, 3)
        if not message:
            return
        if not (pid := os.fork()):
            asked.close()
            return become(*json.loads(message), streams)
        for fd in streams:
            os.close(fd)
        asked.send(str(pid).encode())
        asked.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


@functools.cache
def server(env):
    "The socket of a server with the variables `env`, pairs of name and value, which ends with this process."
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(its.fileno())]
    p = subprocess.Popen(command, pass_fds=[its.fileno()], env=dict(env))
    its.close()
    atexit.register(lambda: (ours.close(), p.wait()))
    return ours


def warm(command, cwd, env, input=None, stdout=None, stderr=None, timeout=50, imported=None):
    """The finished process of `command`, a list that begins with the interpreter and `-m`, and what it wrote, as text.

    `stdout`, `stderr`: descriptors to write to instead. After `timeout` seconds it is killed. `imported`: the variables that the imports
    saw, where they are not those of `env`. Where nothing forks so, an ordinary process."""
    if not LINUX:
        to = [subprocess.PIPE if f is None else f for f in (stdout, stderr)]
        how = dict(stdout=to[0], stderr=to[1], cwd=cwd, env=env, timeout=timeout)
        return subprocess.run(command, input=input or "", encoding="utf-8", **how)
    asked = server(tuple(sorted((imported or env).items())))
    args = [str(a) for a in command[2:]]
    kept, threads, own = {}, [], []

    def pipe(name, to):
        if to is not None:
            return to
        r, w = os.pipe()
        own.append(w)
        threads.append(threading.Thread(target=lambda: kept.update({name: read(r)}), daemon=True))
        return w

    def read(r):
        with open(r, encoding="utf-8") as f:
            return f.read()

    r, w = os.pipe()
    own.append(r)
    streams = [r, pipe("stdout", stdout), pipe("stderr", stderr)]
    data, message = (input or "").encode(), json.dumps([args, str(cwd), env]).encode()
    killed = threading.Event()
    try:
        socket.send_fds(asked, [message], streams)
        for fd in own:
            os.close(fd)
        for t in threads:
            t.start()
        assert (pid := int(asked.recv(99))) > 0
        late = threading.Timer(timeout, lambda: (killed.set(), os.kill(pid, signal.SIGKILL)))
        late.start()
        with contextlib.suppress(BrokenPipeError), open(w, "wb") as f:
            f.write(data)
        status = int(asked.recv(99))
        late.cancel()
    except BaseException:  # else the next command would read this one's answers
        asked.close()
        server.cache_clear()
        raise
    for t in threads:
        t.join(timeout)
    if killed.is_set() or any(t.is_alive() for t in threads):
        raise subprocess.TimeoutExpired(command, timeout)
    return subprocess.CompletedProcess(command, status, kept.get("stdout"), kept.get("stderr"))


if __name__ == "__main__":
    # It comes with torch for a GPU, and counts its leaks on standard error where a fork ends.
    sys.modules["triton"] = None
    import batchlab.api, batchlab.cli  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    serve(socket.socket(fileno=int(sys.argv[1])))
