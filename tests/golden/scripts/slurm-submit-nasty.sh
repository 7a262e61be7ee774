# Submits the job. Its script arrives on stdin.
command -v sbatch >/dev/null 2>&1 || { echo 'sbatch: not found' >&2; exit 127; }
exec timeout 30 sbatch --parsable '--job-name=20261127-101500-sft-1a2b' '--nodes=2' '--nodelist=n1,n2' '--ntasks-per-node=1' --exclusive '--mem=0' --requeue '--open-mode=append' '--output=/dev/null' '--chdir=/' '--signal=B:USR1@120' '--gpus-per-node=8' '--partition=main' '--time=2-12' '--account=team' '--qos=it'\''s high' </dev/stdin
