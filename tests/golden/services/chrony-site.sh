# ===== apply, stage serve: gpu02
# --- chrony: installed
# unless
cc_service=chrony
command -v chronyd
# do
cc_service=chrony
cc_say "chronyd is not installed: add it with services: os_packages:, or by hand"
false
# --- chrony: no other clock daemon
# unless
cc_service=chrony
for cc_u in systemd-timesyncd.service ntp.service ntpd.service ntpsec.service openntpd.service; do cc_off "$cc_u" || exit 1; done
# do
cc_service=chrony
for cc_u in systemd-timesyncd.service ntp.service ntpd.service ntpsec.service openntpd.service; do cc_off "$cc_u" || cc_stop "$cc_u"; done
# --- chrony: configuration
# unless
cc_service=chrony
# Debian and Ubuntu: /etc/chrony/chrony.conf and chrony.service; Red Hat: /etc/chrony.conf and chronyd.service.
if [ -d /etc/chrony ]; then cc_conf=/etc/chrony/chrony.conf; else cc_conf=/etc/chrony.conf; fi
if cc_has_unit chrony.service; then cc_unit=chrony.service; else cc_unit=chronyd.service; fi
cc_text='# Written by clusterctl; `clusterctl services undo chrony` restores the previous file.
server 192.168.20.1 iburst
server time.site.lan iburst
local stratum 10
allow 10.1.0.1
allow 10.1.0.3
driftfile /var/lib/chrony/drift
makestep 1.0 3
rtcsync
'
cc_is "$cc_conf" 644 "$cc_text"
# do
cc_service=chrony
# Debian and Ubuntu: /etc/chrony/chrony.conf and chrony.service; Red Hat: /etc/chrony.conf and chronyd.service.
if [ -d /etc/chrony ]; then cc_conf=/etc/chrony/chrony.conf; else cc_conf=/etc/chrony.conf; fi
if cc_has_unit chrony.service; then cc_unit=chrony.service; else cc_unit=chronyd.service; fi
cc_text='# Written by clusterctl; `clusterctl services undo chrony` restores the previous file.
server 192.168.20.1 iburst
server time.site.lan iburst
local stratum 10
allow 10.1.0.1
allow 10.1.0.3
driftfile /var/lib/chrony/drift
makestep 1.0 3
rtcsync
'
cc_remember "$cc_unit"
cc_stage "$cc_conf" 644 "$cc_text"
chronyd -p -f "$cc_new" >/dev/null
cc_commit "$cc_conf"
cc_restart "$cc_unit"
cc_done "$cc_conf"
# --- chrony: running
# unless
cc_service=chrony
# Debian and Ubuntu: /etc/chrony/chrony.conf and chrony.service; Red Hat: /etc/chrony.conf and chronyd.service.
if [ -d /etc/chrony ]; then cc_conf=/etc/chrony/chrony.conf; else cc_conf=/etc/chrony.conf; fi
if cc_has_unit chrony.service; then cc_unit=chrony.service; else cc_unit=chronyd.service; fi

cc_on "$cc_unit"
# do
cc_service=chrony
# Debian and Ubuntu: /etc/chrony/chrony.conf and chrony.service; Red Hat: /etc/chrony.conf and chronyd.service.
if [ -d /etc/chrony ]; then cc_conf=/etc/chrony/chrony.conf; else cc_conf=/etc/chrony.conf; fi
if cc_has_unit chrony.service; then cc_unit=chrony.service; else cc_unit=chronyd.service; fi

cc_start "$cc_unit"
# ===== apply, stage follow: gpu01 gpu03
# --- chrony: installed
# unless
cc_service=chrony
command -v chronyd
# do
cc_service=chrony
cc_say "chronyd is not installed: add it with services: os_packages:, or by hand"
false
# --- chrony: no other clock daemon
# unless
cc_service=chrony
for cc_u in systemd-timesyncd.service ntp.service ntpd.service ntpsec.service openntpd.service; do cc_off "$cc_u" || exit 1; done
# do
cc_service=chrony
for cc_u in systemd-timesyncd.service ntp.service ntpd.service ntpsec.service openntpd.service; do cc_off "$cc_u" || cc_stop "$cc_u"; done
# --- chrony: configuration
# unless
cc_service=chrony
# Debian and Ubuntu: /etc/chrony/chrony.conf and chrony.service; Red Hat: /etc/chrony.conf and chronyd.service.
if [ -d /etc/chrony ]; then cc_conf=/etc/chrony/chrony.conf; else cc_conf=/etc/chrony.conf; fi
if cc_has_unit chrony.service; then cc_unit=chrony.service; else cc_unit=chronyd.service; fi
cc_text='# Written by clusterctl; `clusterctl services undo chrony` restores the previous file.
server 10.1.0.2 iburst minpoll 4 maxpoll 6
driftfile /var/lib/chrony/drift
makestep 1.0 3
rtcsync
'
cc_is "$cc_conf" 644 "$cc_text"
# do
cc_service=chrony
# Debian and Ubuntu: /etc/chrony/chrony.conf and chrony.service; Red Hat: /etc/chrony.conf and chronyd.service.
if [ -d /etc/chrony ]; then cc_conf=/etc/chrony/chrony.conf; else cc_conf=/etc/chrony.conf; fi
if cc_has_unit chrony.service; then cc_unit=chrony.service; else cc_unit=chronyd.service; fi
cc_text='# Written by clusterctl; `clusterctl services undo chrony` restores the previous file.
server 10.1.0.2 iburst minpoll 4 maxpoll 6
driftfile /var/lib/chrony/drift
makestep 1.0 3
rtcsync
'
cc_remember "$cc_unit"
cc_stage "$cc_conf" 644 "$cc_text"
chronyd -p -f "$cc_new" >/dev/null
cc_commit "$cc_conf"
cc_restart "$cc_unit"
cc_done "$cc_conf"
# --- chrony: running
# unless
cc_service=chrony
# Debian and Ubuntu: /etc/chrony/chrony.conf and chrony.service; Red Hat: /etc/chrony.conf and chronyd.service.
if [ -d /etc/chrony ]; then cc_conf=/etc/chrony/chrony.conf; else cc_conf=/etc/chrony.conf; fi
if cc_has_unit chrony.service; then cc_unit=chrony.service; else cc_unit=chronyd.service; fi

cc_on "$cc_unit"
# do
cc_service=chrony
# Debian and Ubuntu: /etc/chrony/chrony.conf and chrony.service; Red Hat: /etc/chrony.conf and chronyd.service.
if [ -d /etc/chrony ]; then cc_conf=/etc/chrony/chrony.conf; else cc_conf=/etc/chrony.conf; fi
if cc_has_unit chrony.service; then cc_unit=chrony.service; else cc_unit=chronyd.service; fi

cc_start "$cc_unit"
# --- chrony: synchronised
# unless
cc_service=chrony
# The clock is synchronised and within the bound, such as `System time : 0.000012 seconds slow of NTP time`.
chronyc -n tracking 2>/dev/null | awk -v near=0.05 '
  /^System time/ { if ($4 + 0 <= near) close_by = 1 }
  /^Leap status *: Normal/ { normal = 1 }
  END { exit !(close_by && normal) }'

# do
cc_service=chrony
# Debian and Ubuntu: /etc/chrony/chrony.conf and chrony.service; Red Hat: /etc/chrony.conf and chronyd.service.
if [ -d /etc/chrony ]; then cc_conf=/etc/chrony/chrony.conf; else cc_conf=/etc/chrony.conf; fi
if cc_has_unit chrony.service; then cc_unit=chrony.service; else cc_unit=chronyd.service; fi
# chronyc waits until chronyd has a source, then until the clock is within the bound. A running chronyd slews: one
# second takes about twelve, and it mistakes a clock that was set by hand for one that drifts. If the clock is a
# second or more off, restart chronyd: it forgets the drift and steps the clock. This runs before a training, never
# during one.
chronyc -n burst 4/4 >/dev/null 2>&1 || :
chronyc -n waitsync 30 0 0 1 >/dev/null 2>&1 || :
if chronyc -n tracking | awk '/^System time/ { exit !($4 >= 1) }'; then cc_restart "$cc_unit"; fi
if ! chronyc -n waitsync 60 0.05 0 1 >/dev/null 2>&1; then
  cc_say "the clock is not synchronised: check that UDP port 123 of the head is open"
  chronyc -n sources >&2 || :
  false
fi
# ===== verify, stage serve: gpu02
# --- chrony: serves the time
# unless
cc_service=chrony
cc_t=$(chronyc -n tracking 2>&1)
printf "%s\n" "$cc_t" | grep -q "^Leap status *: Normal"
# do
cc_service=chrony
cc_t=$(chronyc -n tracking 2>&1)
printf "%s\n" "$cc_t" | grep -E "^(Stratum|System time|Leap status|506)"
false
# ===== verify, stage follow: gpu01 gpu03
# --- chrony: follows the head
# unless
cc_service=chrony
cc_t=$(chronyc -n tracking 2>&1)
printf "%s\n" "$cc_t" | grep -q "^Leap status *: Normal"
# The clock is synchronised and within the bound, such as `System time : 0.000012 seconds slow of NTP time`.
chronyc -n tracking 2>/dev/null | awk -v near=0.05 '
  /^System time/ { if ($4 + 0 <= near) close_by = 1 }
  /^Leap status *: Normal/ { normal = 1 }
  END { exit !(close_by && normal) }'

# do
cc_service=chrony
cc_t=$(chronyc -n tracking 2>&1)
printf "%s\n" "$cc_t" | grep -E "^(Stratum|System time|Leap status|506)"
false
