# Sourced by ./check, after setup.sh: a Docker engine for the tests, and the image of the sandboxes.

docker_up() { # An engine that answers is used as it is; else one without a network is started, which docker_down stops.
  apt_install docker.io dockerd "the sandbox backend docker is tested with it"
  apt_install debootstrap debootstrap "the image of the backend docker is made with it where there is no registry"
  if ! docker_answers; then
    if [ "$(id -u)" != 0 ] || ! command -v dockerd >/dev/null; then
      echo "no Docker engine answers, and none can be started here: the tests with the marker docker are left out"
      return
    fi
    docker_log=$(mktemp -t reins-dockerd-XXXXXX.log)
    echo "starting dockerd (its log: $docker_log)"
    dockerd --bridge=none --iptables=false >"$docker_log" 2>&1 </dev/null &
    docker_pid=$!
    trap docker_down EXIT
    for _ in $(seq 120); do
      docker_answers && break
      kill -0 "$docker_pid" 2>/dev/null || break
      sleep 0.5
    done
    if ! docker_answers; then
      tail -n 20 "$docker_log" >&2
      echo "dockerd did not come up" >&2
      return 1
    fi
  fi
  python -m envs.sandbox image
}

docker_answers() {
  python -c 'import sys; from envs.sandbox.engine import unreachable; sys.exit(bool(unreachable()))'
}

docker_down() {
  if [ -n "${docker_pid:-}" ]; then
    kill "$docker_pid" 2>/dev/null && wait "$docker_pid" || true
    docker_pid=
  fi
}
