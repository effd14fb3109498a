# Sourced by the run-*.sh beside it and by examples/*/run.sh: how a run is started.
#
#   launch train.py FLAG ...     this process becomes train.py, which starts a Ray of its own; a program that is not
#                                in the checkout is named by its whole path
#   start_server NAME PLACE COMMAND ...
#                                before it: a server that ends with the run, and prints a line once it listens;
#                                not in a dry run
#
#   "$(precision)"               a flag: --bf16 on a host with a GPU, whose usual engines know no float32, else --fp32
#
#   launch train.py --max-restarts 3 FLAG ...
#                                start it again when it fails, from the newest checkpoint in its --save, three times at
#                                most; not after bad input, nor after Ctrl-C or SIGTERM
#
#   MAX_RESTARTS=3                   the same, without the flag
#   DRY_RUN=1                        print the command, and check it (--dry-run); nothing is started
#   RAY_ADDRESS=http://HOST:8265     submit it as a job to the Ray whose job server that is
#   RAY_ADDRESS=HOST:6379            join that Ray
#   NUM_NODES=4 NODE_RANK=0 MASTER_ADDR=HOST0
#                                    on each of four nodes, with its NODE_RANK: node 0 starts a Ray, waits until the
#                                    others have joined it, and trains; Ray ends with the run, on every node
#   NODES_TIMEOUT=600                seconds that nodes wait for each other
#   END_TIMEOUT=120                  seconds that node 0's run and its Ray have to end, before they are killed
#   RAY_PORT=6379 RAY_START_ARGS=... of the Ray that is started so, words of `ray start` such as "--num-gpus 8"
#   PYTHON=python3                   what runs train.py
set -euo pipefail
SLIME_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
NUM_NODES=${NUM_NODES:-1}

launch() {
   local script=$1 command flags restarts
   [[ $script == /* ]] || script=$SLIME_DIR/$script
   _take_restarts "${@:2}"
   command=("$PYTHON" "$script" "${flags[@]}")
   _check_nodes
   if [ "${DRY_RUN:-0}" != 0 ]; then
      _print "${command[@]}"
      exec "${command[@]}" --dry-run
   fi
   [ "$restarts" = 0 ] || command=("$PYTHON" "$SLIME_DIR/tools/restart_run.py" "$restarts" -- "${command[@]}")
   if [[ ${RAY_ADDRESS:-} == http*://* ]]; then
      "$PYTHON" -c 'import aiohttp, pydantic, ray.job_submission' 2> /dev/null ||
         _die "$PYTHON has no Ray by which a job is submitted: install ray[default], or set PYTHON to one that has it"
      _use_token
      export RUNTIME_ENV_JSON=${RUNTIME_ENV_JSON:-} # not as a word: ps shows these
      # A job starts in the directory of the Ray.
      exec "$PYTHON" "$SLIME_DIR/tools/submit_job.py" -- env "--chdir=$PWD" "${command[@]}"
   elif [ "$NUM_NODES" -gt 1 ] && [ -z "${RAY_ADDRESS:-}" ]; then
      _check_installation
      _on_nodes "${command[@]}"
   else
      [ -z "${RAY_ADDRESS:-}" ] || _use_token
      exec "${command[@]}"
   fi
}

start_server() {
   local name=$1 place=$2 server
   [ "${DRY_RUN:-0}" = 0 ] || return 0
   exec 4< <(exec "${@:3}")
   server=$!
   # This process becomes the run: when that ends, however it ends, the pipe closes and the server is ended.
   exec 3> >(trap '' HUP INT TERM; cat > /dev/null; kill "$server" 2> /dev/null)
   if ! read -r -t 120 <&4; then
      printf 'launch: error: %s did not come up on %s: it ended, or took 120 s\n' "$name" "$place" >&2
      exit 1
   fi
}

precision() {
   if [ -e /dev/nvidiactl ] && PYTHONPATH=$SLIME_DIR "$PYTHON" -c \
      'import sys; from slime.utils import device; sys.exit(not device.is_cuda())'; then echo --bf16; else echo --fp32; fi
}

_take_restarts() { # Into flags what is the program's, into restarts the rest.
   flags=() restarts=${MAX_RESTARTS:-0}
   while [ $# -gt 0 ]; do
      case $1 in
         --max-restarts) [ $# -gt 1 ] || _die "--max-restarts needs a number"; restarts=$2; shift ;;
         --max-restarts=*) restarts=${1#*=} ;;
         *) flags+=("$1") ;;
      esac
      shift
   done
   [[ $restarts =~ ^(0|[1-9][0-9]*)$ ]] || _die "--max-restarts $restarts is not a whole number from 0 (MAX_RESTARTS)"
}

_check_nodes() { # A dry run may be of the whole run, without a node's own variables.
   [[ $NUM_NODES =~ ^[1-9][0-9]*$ ]] || _die "NUM_NODES=$NUM_NODES is not a whole number from 1"
   [ "$NUM_NODES" -gt 1 ] && [ -z "${RAY_ADDRESS:-}" ] || return 0
   if [ "${DRY_RUN:-0}" != 0 ] && [ -z "${NODE_RANK:-}" ]; then
      printf 'launch: a run on %s nodes needs NODE_RANK and MASTER_ADDR on each of them\n' "$NUM_NODES" >&2
      return 0
   fi
   [ -n "${NODE_RANK:-}" ] || _die "NUM_NODES=$NUM_NODES needs NODE_RANK, from 0 to $((NUM_NODES - 1))"
   [[ $NODE_RANK =~ ^(0|[1-9][0-9]*)$ ]] && [ "$NODE_RANK" -lt "$NUM_NODES" ] ||
      _die "NODE_RANK=$NODE_RANK is not a node of NUM_NODES=$NUM_NODES: from 0 to $((NUM_NODES - 1))"
   [ -n "${MASTER_ADDR:-}" ] || _die "NUM_NODES=$NUM_NODES needs MASTER_ADDR, the address of node 0"
}

_use_token() { # A Ray that is started where there is a token asks for it, and gets it from those in this mode only.
   if [ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ] || [ -f ~/.ray/auth_token ]; then
      export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
   fi
}

_check_installation() { # before a Ray is started: train.py would say so only then
   PYTHONPATH=$SLIME_DIR${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" -c \
      'from slime.entry.installation import check_installation; check_installation("launch")' || exit 2
}

_die() { printf 'launch: error: %s\n' "$*" >&2; exit 2; }

_print() { # one flag a line, without secrets; nothing where PYTHON is none, as what comes next says
   local words word
   mapfile -d '' -t words < <(printf '%s\0' "$@" | PYTHONPATH=$SLIME_DIR${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" -c \
      'from slime.utils.command_line import show; show()')
   [ ${#words[@]} -gt 0 ] || return 0
   printf '%q' "${words[0]}"
   for word in "${words[@]:1}"; do
      word=${word//'<redacted>'/'***'}
      case $word in --*) printf ' \\\n  ' ;; esac
      printf ' %q' "$word"
   done
   printf '\n'
}

_on_nodes() {
   local timeout=${NODES_TIMEOUT:-600} words ray=("$PYTHON" -m ray.scripts.scripts start --block --disable-usage-stats)
   if ! { [ -t 1 ] && [ -t 2 ]; }; then # Ray colours files too
      ray+=(--log-color false)
      export RAY_COLOR_PREFIX=${RAY_COLOR_PREFIX:-0}
   fi
   # A Ray that is told to report no usage reports that to the world.
   export RAY_USAGE_STATS_REPORT_URL=${RAY_USAGE_STATS_REPORT_URL:-http://127.0.0.1:9}
   : "${RAY_PORT:=6379}"
   read -ra words <<<"${RAY_START_ARGS:-}"
   _use_token
   _bypass_proxies
   if [ "$NODE_RANK" -gt 0 ]; then
      _wait_for_ray "$timeout" $$
      exec "${ray[@]}" --address "$MASTER_ADDR:$RAY_PORT" "${words[@]}"
   fi
   _users=$(jobs -rp) # what the script that sourced this has started; not local: the trap runs after this function
   trap _end_children EXIT
   trap 'exit 130' INT
   trap 'exit 143' TERM
   "${ray[@]}" --head --node-ip-address "$MASTER_ADDR" --port "$RAY_PORT" "${words[@]}" &
   _wait_for_ray "$timeout" $!
   export RAY_ADDRESS=$MASTER_ADDR:$RAY_PORT
   # In the background, so that this shell hears signals, and passes them on.
   "$PYTHON" "$SLIME_DIR/tools/wait_for_nodes.py" "$NUM_NODES" --timeout "$timeout" &
   wait $!
   "$@" &
   wait $!
}

_bypass_proxies() { # for what Ray's own processes ask each other, and of the metadata server of a cloud
   local known=${no_proxy:-}${no_proxy:+${NO_PROXY:+,}}${NO_PROXY:-}
   [[ ,$known, != *,\*,* ]] || return 0
   export no_proxy=${known:+$known,}localhost,127.0.0.1,::1,$MASTER_ADDR,169.254.169.254,metadata.google.internal
   export NO_PROXY=$no_proxy
}

# shellcheck disable=SC2086 # a word of $running is a process
_end_children() { # TERM, and KILL for what has not ended after END_TIMEOUT seconds
   local deadline=$((SECONDS + ${END_TIMEOUT:-120})) running
   running=$(_children)
   [ -z "$running" ] || kill $running 2>/dev/null || true
   while [ -n "$running" ]; do
      if [ $SECONDS -ge $deadline ]; then
         printf 'launch: error: not ended within %s s (END_TIMEOUT), killed: processes %s; those of their Ray may be left\n' \
            "${END_TIMEOUT:-120}" "${running//$'\n'/ }" >&2
         kill -KILL $running 2>/dev/null || true
         return 0
      fi
      sleep 0.2
      running=$(_children)
   done
}

_children() { # that still run: the number of one that has ended may be another's
   jobs -rp | grep -vxF -- "$_users" || true
}

_wait_for_ray() { # SECONDS PID: until node 0's Ray takes connections, and only while that process lives
   local deadline=$((SECONDS + $1))
   # shellcheck disable=SC2016 # that bash expands its $0 and $1
   until timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$MASTER_ADDR" "$RAY_PORT" 2>/dev/null; do
      kill -0 "$2" 2>/dev/null || _die "starting Ray at $MASTER_ADDR:$RAY_PORT failed"
      [ $SECONDS -lt $deadline ] || _die "no Ray at $MASTER_ADDR:$RAY_PORT within $1 s (NODES_TIMEOUT)"
      sleep 1
   done
}
