{{/* Objects of every service; each template takes (dict "root" $ "service" "verifier"). */}}

{{/* "objectName" if it differs from the service's name. */}}
{{- define "draftwire.metadata" -}}
name: {{ .objectName | default (include "draftwire.name" .) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "draftwire.labels" . | nindent 2 }}
{{- end }}

{{- define "draftwire.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "draftwire.metadata" . | nindent 2 }}
  {{- with (index .root.Values .service).serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{/* A pod that never becomes ready must not block a node drain. */}}
{{- define "draftwire.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "draftwire.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "draftwire.selector" . | nindent 6 }}
{{- end }}

{{/* appProtocol: what a mesh, an Ingress controller or a Gateway speaks to the port; none of them guesses HTTP/2. */}}
{{- define "draftwire.servicePorts" -}}
{{- $protocols := dict "grpc" "kubernetes.io/h2c" "http" "http" -}}
{{- if .root.Values.tls.enabled -}}
{{- $protocols = dict "grpc" "https" "http" "https" -}}
{{- end -}}
{{- if eq .service "gateway" -}}
{{- range $port, $protocol := .root.Values.gateway.service.appProtocols -}}
{{- $_ := set $protocols $port ($protocol | default (get $protocols $port)) -}}
{{- end -}}
{{- end -}}
- {name: grpc, port: {{ include "draftwire.port" . }}, targetPort: grpc, appProtocol: {{ $protocols.grpc }}}
{{- if eq .service "gateway" }}
- {name: http, port: 8000, targetPort: http, appProtocol: {{ $protocols.http }}}
{{- end }}
{{- if and .root.Values.monitoring.enabled (ne .service "gateway") }}{{/* whose metrics have a Service of their own */}}
- {name: metrics, port: {{ include "draftwire.metricsPort" . }}, targetPort: metrics, appProtocol: http}
{{- end }}
{{- end }}

{{/* Headless: gateways choose the verifier and the drafter of each session themselves, and drafters call the session's
verifier. */}}
{{- define "draftwire.headlessService" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "draftwire.metadata" . | nindent 2 }}
spec:
  clusterIP: None
  selector:
    {{- include "draftwire.selector" . | nindent 4 }}
    {{- with .selector }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    {{- include "draftwire.servicePorts" . | nindent 4 }}
{{- end }}

{{/* gRPC supports RSA, and ECDSA on P-256 or P-384; not Ed25519. Every service presents its certificate as a server and,
except the verifier, as a client. */}}
{{- define "draftwire.certificate" -}}
{{- with .root.Values.tls -}}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  {{- include "draftwire.metadata" $ | nindent 2 }}
spec:
  secretName: {{ include "draftwire.tlsSecret" $ }}
  commonName: {{ $.service }}
  dnsNames:
    {{- prepend ($.names | default list) .targetName | uniq | toYaml | nindent 4 }}
  uris: ["urn:draftwire:role:{{ $.service }}"]
  usages: [digital signature, server auth, client auth]
  privateKey: {algorithm: ECDSA, size: 256, rotationPolicy: Always}
  duration: {{ .certManager.duration }}
  renewBefore: {{ .certManager.renewBefore }}
  issuerRef:
    group: cert-manager.io
    kind: {{ .certManager.issuer.kind }}
    name: {{ .certManager.issuer.name }}
{{- end -}}
{{- end }}
