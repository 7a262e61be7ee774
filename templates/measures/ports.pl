# perl -e TEXT listen TOKEN NAME OWN LIFE MASTER...   or   connect TOKEN TIMEOUT (PEER KIND ADDRESS PORT)...
# The same as ports.py, for nodes without Python; perl-base is enough. What it prints: provision/checks/kit/measures.py.
use strict;
use Errno;
use Fcntl;
use Socket qw(:DEFAULT :addrinfo IN6ADDR_ANY IPPROTO_IPV6 IPV6_V6ONLY pack_sockaddr_in6 unpack_sockaddr_in6);
$| = 1;
$SIG{PIPE} = 'IGNORE';
my ($mode, $token, @args) = @ARGV;

sub plain { # an address as text, an IPv4 one also where it came through a socket for both
    my ($error, $host) = getnameinfo($_[0], NI_NUMERICHOST, NIx_NOSERV);
    return '-' if $error;
    $host =~ s/^::ffff:(?=[0-9.]+$)//;
    return $host;
}
sub quiet { fcntl($_[0], F_SETFL, fcntl($_[0], F_GETFL, 0) | O_NONBLOCK) }
sub found { # the first address of a name, IPv4 before others
    my ($error, @all) = getaddrinfo($_[0], $_[1], { socktype => SOCK_STREAM });
    @all = ((grep { $_->{family} == AF_INET } @all), @all);
    return $error ? () : $all[0];
}
sub ready { # handles that can be read from, and written to
    my ($seconds, $read, $write) = @_;
    my ($in, $out) = ('', '');
    vec($in, fileno($_), 1) = 1 for @$read;
    vec($out, fileno($_), 1) = 1 for @$write;
    select($in, $out, undef, $seconds);
    return ([grep { vec($in, fileno($_), 1) } @$read], [grep { vec($out, fileno($_), 1) } @$write]);
}

sub listener { # a socket on a port, 0 for any, and its number; or why not
    my ($port) = @_;
    for my $family (AF_INET6, AF_INET) {
        socket(my $socket, $family, SOCK_STREAM, 0) or next;
        setsockopt($socket, SOL_SOCKET, SO_REUSEADDR, 1);
        setsockopt($socket, IPPROTO_IPV6, IPV6_V6ONLY, 0) if $family == AF_INET6;
        my $any = $family == AF_INET6 ? pack_sockaddr_in6($port, IN6ADDR_ANY) : pack_sockaddr_in($port, INADDR_ANY);
        if (bind($socket, $any) && listen($socket, 1024)) {
            my $bound = getsockname($socket);
            return ($socket, $family == AF_INET6 ? (unpack_sockaddr_in6($bound))[0] : (unpack_sockaddr_in($bound))[0]);
        }
        return (undef, 'busy') if $!{EADDRINUSE};
        return (undef, "$!") unless $family == AF_INET6 && ($!{EADDRNOTAVAIL} || $!{EAFNOSUPPORT});
    }
    return (undef, "$!");
}

if ($mode eq 'listen') {
    my ($name, $own, $life, @wanted) = @args;
    my $address = found($own, 0);
    print "self ", $address ? plain($address->{addr}) : '-', "\n";
    my %open;
    for my $port (@wanted) {
        my ($socket, $number) = listener($port);
        my $kind = $port ? 'master' : 'random';
        print $socket ? "listen $kind $number open\n" : "listen $kind $port $number\n";
        $open{ fileno($socket) } = $socket if $socket;
    }
    print "ready\n";
    my %talking;
    my $end = time + $life;
    while (time < $end) {
        my ($in) = ready(1, [\*STDIN, values %open, values %talking], []);
        for my $handle (@$in) {
            my $number = fileno($handle);
            if ($number == fileno(STDIN)) {
                exit 0 unless sysread(STDIN, my $data, 512);
            } elsif ($open{$number}) {
                my $from = accept(my $talk, $handle) or next;
                syswrite($talk, "clusterctl $token $name " . plain($from) . "\n");
                $talking{ fileno($talk) } = $talk;
            } elsif (!sysread($handle, my $data, 512)) { # the other side closes first, and keeps the port waiting there
                delete $talking{$number};
                close($handle);
            }
        }
    }
    exit 0;
}

my ($timeout, @targets) = @args;
my %going;
sub report { my ($one, @words) = @_; print join(' ', 'tried', @$one{qw(peer kind port)}, @words), "\n" }
sub failed { # by the error of a connection; the kernel's own timeout is longer than ours
    my ($one, $error) = @_;
    local $! = $error;
    report($one, $!{ECONNREFUSED} ? 'refused' : $!{ETIMEDOUT} ? 'timeout' : ('unreachable', "$!"));
}
while (@targets) {
    my %one;
    @one{qw(peer kind address port)} = splice(@targets, 0, 4);
    my $to = found($one{address}, $one{port});
    if (!$to) { report(\%one, 'unreachable', "$one{address} has no address here"); next }
    socket($one{socket}, $to->{family}, SOCK_STREAM, 0) or do { failed(\%one, $!); next };
    quiet($one{socket});
    if (!connect($one{socket}, $to->{addr}) && !$!{EINPROGRESS}) { failed(\%one, $!); next }
    $one{answer} = '';
    $going{ fileno($one{socket}) } = \%one;
}
my $end = time + $timeout + 1; # whole seconds: not less than was asked for
while (%going && time < $end) {
    my @waiting = grep { !$_->{open} } values %going;
    my @talking = grep { $_->{open} } values %going;
    my ($in, $out) = ready(0.5, [map { $_->{socket} } @talking], [map { $_->{socket} } @waiting]);
    for my $socket (@$out) {
        my $one = $going{ fileno($socket) };
        my $error = unpack('i', getsockopt($socket, SOL_SOCKET, SO_ERROR));
        if ($error) { failed($one, $error); delete $going{ fileno($socket) } }
        else { $one->{open} = 1; $one->{source} = plain(getsockname($socket)) }
    }
    for my $socket (@$in) {
        my $one = $going{ fileno($socket) };
        my $count = sysread($socket, $one->{answer}, 512, length $one->{answer});
        next if $count && $one->{answer} !~ /\n/;
        delete $going{ fileno($socket) };
        if ($one->{answer} =~ /^clusterctl \Q$token $one->{peer}\E (\S+)\n/) { report($one, 'open', $1, $one->{source}) }
        else { report($one, 'foreign') }
    }
}
report($_, $_->{open} ? 'foreign' : 'timeout') for values %going;
